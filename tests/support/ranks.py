"""`@ranks` and `run_ranks`: a function of (rank, world_size), run by real processes, reported as one test.

Functions travel by name, so they live at the top of a module that the worker can import; arguments and results are
pickled. Fixtures such as `tmp_path` work and are the same on all ranks.
"""

import functools
import inspect
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest

from support.fork_server import close_fork_server
from support.pool import Outcome, Pool
from support.protocol import Job

TIMEOUT_S = 60.0
GRACE_S = 3.0
_pools: dict[int, Pool] = {}


class RanksFailed(Exception):
    """At least one rank raised, died or hung. `outcomes` has every rank, the first to fail first."""

    def __init__(self, message: str, outcomes: list[Outcome]) -> None:
        super().__init__(message)
        self.outcomes = outcomes


def ranks(*world_sizes: int, timeout: float = TIMEOUT_S, **options: Any) -> Callable[[Callable[..., None]], Any]:
    """Run a test on every rank of each world size. Combines with `pytest.mark.parametrize`.

    Without world sizes, `world_size` is left to another decorator (`support.matrix`).
    `options` are those of `run_ranks`: `fresh`, `init`, `torchrun`, `grace`.
    """

    def decorate(test: Callable[..., None]) -> Any:
        require_ranks_signature(test)

        @functools.wraps(test)
        def wrapper(world_size: int, **arguments: Any) -> None:
            __tracebackhide__ = True
            try:
                run_ranks(wrapper, world_size, timeout=timeout, **options, **arguments)
                return
            except RanksFailed as failure:
                message = str(failure)
            pytest.fail(message, pytrace=False)  # out of the handler, so that pytest shows the message once

        parameters = list(inspect.signature(test).parameters.values())[1:]
        keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        wrapper.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]  # read by pytest
        wrapper.rank_function = test  # type: ignore[attr-defined]  # read by the worker
        limited = pytest.mark.timeout(timeout + TIMEOUT_S)(wrapper) if timeout != TIMEOUT_S else wrapper
        if not world_sizes:
            return limited
        return pytest.mark.parametrize("world_size", world_sizes, ids=[f"W{size}" for size in world_sizes])(limited)

    return decorate


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = TIMEOUT_S,
    fresh: bool = False,
    init: bool = True,
    torchrun: bool | None = None,
    check: bool = True,
    grace: float = GRACE_S,
    **kwargs: Any,
) -> list[Any]:
    """Call `function(rank, world_size, *args, **kwargs)` on every rank; the return values, by rank.

    `fresh`: workers of its own, started for this call and ended after it. `init=False` (needs `fresh`): no process
    group, and no torchrun variables either unless `torchrun=True`. `check=False`: the outcomes by rank (`Outcome`:
    value, error, exit code, stacks, output) instead of values or an exception. `grace`: seconds that the other ranks
    get once one has failed.
    """
    __tracebackhide__ = True
    if not (init or fresh):
        raise ValueError("init=False needs workers of its own: pass fresh=True")
    job = make_job(function, args, kwargs)
    pool = Pool(world_size, init=init, torchrun=init if torchrun is None else torchrun) if fresh else shared(world_size)
    try:
        outcomes = pool.run(job, timeout, grace)
    finally:
        if fresh or pool.spent:
            pool.close()
    if not check:
        return sorted(outcomes, key=lambda outcome: outcome.rank)
    return values_of(outcomes, function.__name__, timeout)


def values_of(outcomes: list[Outcome], name: str, timeout: float) -> list[Any]:
    __tracebackhide__ = True
    if all(outcome.skipped is not None for outcome in outcomes):
        pytest.skip(str(outcomes[0].skipped))
    if all(outcome.ok for outcome in outcomes):
        return [outcome.value for outcome in sorted(outcomes, key=lambda outcome: outcome.rank)]
    failed = [outcome.rank for outcome in outcomes if outcome.error or outcome.exitcode is not None]
    what = f"rank {failed[0]} failed first" if failed else f"no end after {timeout:g} s"
    if not failed and any(outcome.skipped is not None for outcome in outcomes):
        what = "some ranks skipped and others did not"
    text = "\n".join(outcome.describe() for outcome in outcomes)
    raise RanksFailed(f"{name} on {len(outcomes)} ranks: {what}\n{text}", outcomes)


def shared(world_size: int) -> Pool:
    """The pool of this world size, started at its first use and again after a failure."""
    if world_size not in _pools or _pools[world_size].spent:
        _pools.pop(world_size, None)
        _pools[world_size] = Pool(world_size)
    return _pools[world_size]


def close_pools() -> None:
    while _pools:
        _pools.popitem()[1].close()
    close_fork_server()


def make_job(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Job:
    module, name = function.__module__, function.__qualname__
    if "." in name or name == "<lambda>" or module == "__main__":
        raise ValueError(
            f"{module}.{name} cannot be sent to the ranks: workers import functions by name. Move it to the top level "
            "of the test module and pass what it closes over as arguments"
        )
    try:
        return Job(module, name, list(sys.path), pickle.dumps((args, kwargs)))
    except Exception as error:
        raise ValueError(f"the arguments of {name} cannot be pickled for the ranks: {error}") from error


def require_ranks_signature(test: Callable[..., Any]) -> None:
    if list(inspect.signature(test).parameters)[:2] != ["rank", "world_size"]:
        raise TypeError(f"{test.__qualname__}: a test under @ranks starts with the parameters (rank, world_size)")
