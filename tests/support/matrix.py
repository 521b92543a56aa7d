"""Big matrices of parameters: a covering array for every run, the full product when asked for.

A covering array of strength 2 has every pair of values of every two parameters in some row, with far fewer rows than
the product: most defects need no more than two settings to meet.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

Row = dict[str, Any]
_is_collecting = True
_wants_full = True


def covering(
    parameters: Mapping[str, Sequence[Any]],
    strength: int = 2,
    constraint: Callable[[Row], bool] | None = None,
    seed: int = 0,
) -> list[Row]:
    """Rows in which every combination of `strength` values occurs that some row allowed by `constraint` contains.

    Greedy and deterministic: each row is one that covers the most of what is left; `seed` settles ties.
    """
    candidates = valid_rows(parameters, constraint)
    random.Random(seed).shuffle(candidates)
    combinations = list(itertools.combinations(range(len(parameters)), min(strength, len(parameters))))
    tuples = [{(cut, tuple(row[i] for i in cut)) for cut in combinations} for row in candidates]
    uncovered = set().union(*tuples)
    chosen = []
    # A row's gain only shrinks as others are taken, so a stale gain is a bound, and the heap spares most recounts.
    heap = [(-len(combinations), index) for index in range(len(candidates))]
    while uncovered:
        _, index = heapq.heappop(heap)
        gain = len(tuples[index] & uncovered)
        if heap and gain < -heap[0][0]:
            heapq.heappush(heap, (-gain, index))
        else:
            chosen.append(candidates[index])
            uncovered -= tuples[index]
    return [as_row(parameters, indices) for indices in sorted(chosen)]


def only_import() -> None:
    """For workers, which import the tests but do not choose among them: an array takes a while to make."""
    global _is_collecting
    _is_collecting = False


def leave_out_full() -> None:
    """For runs that deselect what is marked `full`: there are four times as many such cases as others."""
    global _wants_full
    _wants_full = False


def matrix(
    parameters: Mapping[str, Sequence[Any]],
    strength: int = 2,
    constraint: Callable[[Row], bool] | None = None,
    seed: int = 0,
    ordinary: Callable[[Row], bool] | None = None,
) -> pytest.MarkDecorator:
    """Parametrise a test over a covering array; the rest of the product is marked `full` (`make test-full`).

    The array is chosen among the rows for which `ordinary` holds. World sizes go in as `world_size`, with a bare
    `@ranks()` on the test.
    """
    if not _is_collecting:
        return pytest.mark.parametrize(tuple(parameters), [])
    return pytest.mark.parametrize(
        tuple(parameters), cases(parameters, strength, constraint, seed, ordinary, full=_wants_full)
    )


def cases(
    parameters: Mapping[str, Sequence[Any]],
    strength: int = 2,
    constraint: Callable[[Row], bool] | None = None,
    seed: int = 0,
    ordinary: Callable[[Row], bool] | None = None,
    full: bool = True,
) -> list[Any]:
    """The rows of a matrix for pytest; without `full`, those of the covering array alone."""
    limits = [limit for limit in (constraint, ordinary) if limit is not None]
    chosen = covering(parameters, strength, lambda row: all(limit(row) for limit in limits), seed)
    rest = [as_row(parameters, indices) for indices in valid_rows(parameters, constraint)] if full else []
    marked = [(row, ()) for row in chosen] + [(row, pytest.mark.full) for row in rest if row not in chosen]
    return [pytest.param(*row.values(), marks=marks, id=name(row)) for row, marks in marked]


def valid_rows(
    parameters: Mapping[str, Sequence[Any]], constraint: Callable[[Row], bool] | None
) -> list[tuple[int, ...]]:
    """The allowed part of the product, as indices of values, which need not be hashable."""
    product = itertools.product(*(range(len(values)) for values in parameters.values()))
    rows = [indices for indices in product if constraint is None or constraint(as_row(parameters, indices))]
    if not rows:
        raise ValueError(f"the constraint allows no row of {', '.join(parameters)}")
    return rows


def as_row(parameters: Mapping[str, Sequence[Any]], indices: tuple[int, ...]) -> Row:
    return {key: values[index] for (key, values), index in zip(parameters.items(), indices, strict=True)}


def name(row: Row) -> str:
    return "-".join(f"{key}={getattr(value, '__name__', value)}" for key, value in row.items())
