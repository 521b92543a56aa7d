"""`deepspeed.runtime.lr_schedules`: the schedules of a configuration as classes, and the names of their parameters."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from shardwise.compat.standalone.utils import logger
from shardwise.config import schedules
from shardwise.config.schedules import FormulaLR, check

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST, ONE_CYCLE = "LRRangeTest", "OneCycle"
WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]
LR_RANGE_TEST_MIN_LR, LR_RANGE_TEST_STEP_RATE = "lr_range_test_min_lr", "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE, LR_RANGE_TEST_STAIRCASE = "lr_range_test_step_size", "lr_range_test_staircase"
CYCLE_MIN_LR, CYCLE_MAX_LR, DECAY_LR_RATE = "cycle_min_lr", "cycle_max_lr", "decay_lr_rate"
CYCLE_FIRST_STEP_SIZE, CYCLE_SECOND_STEP_SIZE = "cycle_first_step_size", "cycle_second_step_size"
CYCLE_FIRST_STAIR_COUNT, CYCLE_SECOND_STAIR_COUNT = "cycle_first_stair_count", "cycle_second_stair_count"
DECAY_STEP_SIZE, DECAY_MOM_RATE = "decay_step_size", "decay_mom_rate"
CYCLE_MIN_MOM, CYCLE_MAX_MOM = "cycle_min_mom", "cycle_max_mom"
WARMUP_MIN_LR, WARMUP_MAX_LR = "warmup_min_lr", "warmup_max_lr"
WARMUP_NUM_STEPS, WARMUP_TYPE, TOTAL_NUM_STEPS = "warmup_num_steps", "warmup_type", "total_num_steps"
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"
WARMUP_MIN_RATIO, COS_MIN_RATIO = "warmup_min_ratio", "cos_min_ratio"
__all__ = [*(name for name in globals() if name.isupper()), *VALID_LR_SCHEDULES]


class NamedSchedule(FormulaLR):
    """A schedule whose class has its name. Its parameters are attributes, and `step(n)` goes to iteration n."""

    def __init__(self, optimizer: Any, **params: Any) -> None:
        optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer
        if params.get(WARMUP_TYPE, WARMUP_LOG_RATE) not in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE):
            logger.warning("warmup_type %r is unknown: the warm-up is logarithmic", params[WARMUP_TYPE])
            params[WARMUP_TYPE] = WARMUP_LOG_RATE
        if None in [params.get(key, 1) for key in (WARMUP_NUM_STEPS, TOTAL_NUM_STEPS)]:
            raise ValueError("warmup_num_steps and total_num_steps are numbers of steps: None is none, leave it out")
        if type(self).__name__ in (WARMUP_LR, WARMUP_DECAY_LR) and params.get(WARMUP_MAX_LR) is None:
            params[WARMUP_MAX_LR] = [float(group["lr"]) for group in optimizer.param_groups]
        name, checked = check(type(self).__name__, params)
        for key, value in checked.items():
            if isinstance(value, tuple) and len(value) != len(optimizer.param_groups):
                raise ValueError(f"{key} has {len(value)} values for {len(optimizer.param_groups)} parameter groups")
        super().__init__(optimizer, getattr(schedules, name)(**checked))

    def step(self, last_batch_iteration: int | None = None) -> None:
        if last_batch_iteration is not None:
            self.last_epoch = last_batch_iteration
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration, **super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the iteration of another schedule; DeepSpeed's own state is that number alone."""
        state = dict(state_dict)
        iteration = state.pop("last_batch_iteration", None)
        if iteration is not None:
            state["last_epoch"] = iteration - self._schedule.last_batch_iteration
        super().load_state_dict(state)

    def get_lr_ratio(self) -> float:
        """The rate now, of a group whose own rate is 1."""
        return self._schedule.rate(self.last_batch_iteration, 1.0, 0)

    def get_mom(self) -> list[Any] | None:
        """The betas or momentum of each group now; None where the schedule does not change them."""
        if self._schedule.momentum(self.last_batch_iteration, 0) is None:
            return None
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    @property
    def min_lrs(self) -> list[float]:
        """The lower rate of each group, of a schedule between two."""
        return self._each_group("min_lr")

    @property
    def max_lrs(self) -> list[float]:
        """The upper rate of each group, of a schedule between two."""
        return self._each_group("max_lr")

    def _each_group(self, ending: str) -> list[float]:
        found = getattr(self._schedule, next(key for key in dir(self._schedule) if key.endswith(ending)))
        return list(found) if isinstance(found, tuple) else [found] * len(self.optimizer.param_groups)

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


def __getattr__(name: str) -> Any:
    if name in VALID_LR_SCHEDULES:
        return schedule_class(name)
    raise AttributeError(name)
