"""DeepSpeed's learning-rate schedules as classes: those of a configuration, built from arguments."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from shardwise.config import schedules
from shardwise.config.schedules import FormulaLR, check


class NamedSchedule(FormulaLR):
    """A schedule whose class has its name. `step(n)` goes to iteration n."""

    def __init__(self, optimizer: Any, **params: Any) -> None:
        optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer
        name, checked = check(type(self).__name__, params)
        super().__init__(optimizer, getattr(schedules, name)(**checked))

    def step(self, last_batch_iteration: int | None = None) -> None:
        if last_batch_iteration is not None:
            self.last_epoch = last_batch_iteration
        super().step()

    @property
    def last_batch_iteration(self) -> int:
        return self.last_epoch - 1


@cache
def schedule_class(name: str) -> type[NamedSchedule]:
    """The class of the schedule with this name."""
    return type(name, (NamedSchedule,), {})
