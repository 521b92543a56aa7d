"""The learning rate over a run, as a factor of its highest value."""

from __future__ import annotations

import math

SCHEDULES = ("cosine", "linear", "constant")
FLOOR = 0.1
"""Where the decay ends, as a part of the highest rate."""


def factor(step: int, *, steps: int, warmup: int, schedule: str) -> float:
    """The factor of the update number `step` (from 0): a linear rise over `warmup` updates, then the schedule.

    >>> [round(factor(step, steps=12, warmup=2, schedule="cosine"), 2) for step in (0, 1, 2, 7, 11)]
    [0.5, 1.0, 1.0, 0.55, 0.12]
    """
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    left = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}[schedule]
    return FLOOR + (1 - FLOOR) * left
