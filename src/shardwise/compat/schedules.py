"""DeepSpeed's learning-rate schedules as classes: those of a configuration, built from arguments."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from shardwise.compat.names import (
    TOTAL_NUM_STEPS,
    WARMUP_LINEAR_RATE,
    WARMUP_LOG_RATE,
    WARMUP_NUM_STEPS,
    WARMUP_TYPE,
    logger,
)
from shardwise.config import schedules
from shardwise.config.schedules import FormulaLR, check


class NamedSchedule(FormulaLR):
    """A schedule whose class has its name. Its parameters are attributes, and `step(n)` goes to iteration n."""

    def __init__(self, optimizer: Any, **params: Any) -> None:
        optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer
        if params.get(WARMUP_TYPE, WARMUP_LOG_RATE) not in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE):
            logger.warning("warmup_type %r is unknown: the warm-up is logarithmic", params[WARMUP_TYPE])
            params[WARMUP_TYPE] = WARMUP_LOG_RATE
        if None in [params.get(key, 1) for key in (WARMUP_NUM_STEPS, TOTAL_NUM_STEPS)]:
            raise ValueError("warmup_num_steps and total_num_steps are numbers of steps: None is none, leave it out")
        name, checked = check(type(self).__name__, params)
        super().__init__(optimizer, getattr(schedules, name)(**checked))

    def step(self, last_batch_iteration: int | None = None) -> None:
        if last_batch_iteration is not None:
            self.last_epoch = last_batch_iteration
        super().step()

    def get_lr_ratio(self) -> float:
        """The rate now, of a group whose own rate is 1."""
        return self._schedule.rate(self.last_batch_iteration, 1.0, 0)

    def get_mom(self) -> list[Any] | None:
        """The betas or momentum of each group now; None where the schedule does not change them."""
        if self._schedule.momentum(self.last_batch_iteration) is None:
            return None
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    @property
    def last_batch_iteration(self) -> int:
        return self.last_epoch + self._schedule.last_batch_iteration

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._schedule, name)


@cache
def schedule_class(name: str) -> type[NamedSchedule]:
    """The class of the schedule with this name."""
    return type(name, (NamedSchedule,), {})
