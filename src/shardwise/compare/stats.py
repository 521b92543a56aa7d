"""Medians of rounds and how sure one can be of them. Pure arithmetic, the same for the same numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median

RESAMPLES = 2000


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """The bootstrapped confidence interval of the median of `values`.

    >>> interval([1.0, 1.0, 1.0])
    (1.0, 1.0)
    """
    chance = random.Random(len(values))
    medians = sorted(median(chance.choices(values, k=len(values))) for _ in range(RESAMPLES))
    low = int((1 - level) / 2 * RESAMPLES)
    return medians[low], medians[RESAMPLES - 1 - low]


def ratio(values: Sequence[float], reference: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """How many times `reference` the values are, round by round: the median, and its confidence interval.

    Two rows of one round met the same noise, so that their ratio is steadier than either.

    >>> ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    (2.0, (2.0, 2.0))
    """
    ratios = [value / base for value, base in zip(values, reference, strict=False)]
    return median(ratios), interval(ratios)
