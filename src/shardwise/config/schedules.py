"""The learning-rate schedules of DeepSpeed's documentation: formulas of the iteration, and a torch scheduler of them.

A formula maps the iteration to a learning rate. Iteration -1 is the time before the first scheduler step, so the
first optimizer step uses the formula's value at -1. The annotated attributes of a schedule are its parameters; the
annotation holds the reader of the value.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, get_type_hints

import torch
from torch.optim.lr_scheduler import LRScheduler

from shardwise.config.values import at_least_zero, choice, flag, nearest, one_of, positive, read_params
from shardwise.errors import ConfigError
from shardwise.sizes import whole


def _rates(value: object) -> float | tuple[float, ...]:
    """One rate, or one per parameter group."""
    return tuple(map(at_least_zero, value)) if isinstance(value, list | tuple) else at_least_zero(value)


def _iteration(value: object) -> int:
    return -1 if value in (-1, "-1") else whole(value)


Rate = Annotated[float, at_least_zero]
Rates = Annotated[float | tuple[float, ...], _rates]
Whole = Annotated[int, whole]
Steps = Annotated[int, positive]
Flag = Annotated[bool, flag]


class RateSchedule:
    """Base of all schedules."""

    last_batch_iteration: Annotated[int, _iteration] = -1

    def __init__(self, **params: Any) -> None:
        self.__dict__.update(params)

    def rate(self, i: int, base: float, group: int) -> float:
        """The learning rate at iteration `i` of the parameter group number `group`, whose own rate is `base`."""
        raise NotImplementedError

    def momentum(self, i: int, group: int) -> float | None:
        """The momentum of a parameter group at iteration `i`; None where the schedule does not change it."""
        return None


class _Warmup(RateSchedule):
    warmup_num_steps: Whole = 1000
    warmup_type: Annotated[str, choice("log", "linear")] = "log"

    @property
    def _count(self) -> int:
        return max(2, self.warmup_num_steps)

    def _rise(self, i: int) -> float:
        """The rise from 0 to 1 during the warm-up steps."""
        return i / self._count if self.warmup_type == "linear" else math.log(i + 1) / math.log(self._count)


class WarmupLR(_Warmup):
    warmup_min_lr: Rates = 0.0
    warmup_max_lr: Rates = 0.001

    def rate(self, i: int, base: float, group: int) -> float:
        low, high = _of_group(self.warmup_min_lr, group), _of_group(self.warmup_max_lr, group)
        return low + (high - low) * (0.0 if i < 0 else self._rise(i) if i < self._count else self._after(i))

    def _after(self, i: int) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    total_num_steps: Steps

    def _after(self, i: int) -> float:
        return max(0.0, (self.total_num_steps - i) / max(1.0, self.total_num_steps - self._count))


class WarmupCosineLR(_Warmup):
    total_num_steps: Steps
    warmup_min_ratio: Rate = 0.0
    cos_min_ratio: Rate = 0.0001

    def rate(self, i: int, base: float, group: int) -> float:
        low, floor, count = self.warmup_min_ratio, self.cos_min_ratio, self._count
        if i < count:
            return base * (low + (1 - low) * self._rise(i) if i >= 0 else 0.0)
        decayed = min(1.0, (i - count + 1) / max(1, self.total_num_steps - count))
        return base * (floor + (1 - floor) * ((1 + math.cos(math.pi * decayed)) / 2))


class OneCycle(RateSchedule):
    cycle_min_lr: Annotated[float | tuple[float, ...] | None, _rates] = None
    cycle_max_lr: Annotated[float | tuple[float, ...] | None, _rates] = None
    decay_lr_rate: Rate = 0.0
    cycle_first_step_size: Steps = 2000
    cycle_second_step_size: Annotated[int | None, whole] = None
    cycle_first_stair_count: Whole = 0
    cycle_second_stair_count: Annotated[int | None, whole] = None
    decay_step_size: Whole = 0
    cycle_momentum: Flag = True
    cycle_min_mom: Rates = 0.8
    cycle_max_mom: Rates = 0.9
    decay_mom_rate: Rate = 0.0

    def rate(self, i: int, base: float, group: int) -> float:
        low = base / 10 if self.cycle_min_lr is None else _of_group(self.cycle_min_lr, group)
        high = base if self.cycle_max_lr is None else _of_group(self.cycle_max_lr, group)
        past = self._past_cycle(i)
        return low + (high - low) * self._height(i) if past is None else low / (1 + self.decay_lr_rate * past)

    def momentum(self, i: int, group: int) -> float | None:  # falls as the rate rises
        if not self.cycle_momentum:
            return None
        low, high = _of_group(self.cycle_min_mom, group), _of_group(self.cycle_max_mom, group)
        past = self._past_cycle(i)
        if past is None:
            return high - (high - low) * self._height(i)
        return min(high * (1 + self.decay_mom_rate * past), 0.9999)

    @property
    def _second_step_size(self) -> int:
        given = self.cycle_second_step_size
        return self.cycle_first_step_size if given is None else given

    def _height(self, i: int) -> float:
        """The height of the cycle's triangle at iteration `i`, from 0 to 1, in stairs where they are configured."""
        first, second, step = self.cycle_first_step_size, self._second_step_size, i + 1
        height, stairs = step / first, self.cycle_first_stair_count
        if step > first:
            height = max(0.0, (first + second - step) / second)
            stairs = stairs if self.cycle_second_stair_count is None else self.cycle_second_stair_count
        return math.floor(height * stairs) / stairs if stairs else height

    def _past_cycle(self, i: int) -> float | None:
        """Decay intervals since the end of the cycle; None during the cycle."""
        over = i + 1 - self.cycle_first_step_size - self._second_step_size
        if over < 0:
            return None
        return over / self.decay_step_size if self.decay_step_size else 0.0


class LRRangeTest(RateSchedule):
    lr_range_test_min_lr: Rates = 1e-3
    lr_range_test_step_size: Steps = 2000
    lr_range_test_step_rate: Rate = 1.0
    lr_range_test_staircase: Flag = False

    def rate(self, i: int, base: float, group: int) -> float:
        interval = (i + 1) / self.lr_range_test_step_size
        steps = math.floor(interval) if self.lr_range_test_staircase else interval
        return _of_group(self.lr_range_test_min_lr, group) * (1 + self.lr_range_test_step_rate * steps)


def _of_group(rates: float | tuple[float, ...], group: int) -> float:
    if not isinstance(rates, tuple):
        return rates
    if group >= len(rates):
        raise ConfigError(f"the schedule has {len(rates)} learning rates for more parameter groups")
    return rates[group]


_SCHEDULES = {kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)}


def check(name: str, params: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The canonical name of a schedule and its parameters in their types; ValueError if either is wrong."""
    found = {known.lower(): known for known in _SCHEDULES}.get(name.strip().lower())
    if found is None:
        raise ValueError(f"name {name!r}: expected {one_of(_SCHEDULES)}{nearest(name, _SCHEDULES)}")
    return found, read_params(params, _readers(_SCHEDULES[found]), found)


def default(name: str, param: str) -> Any:
    """The value of a schedule's parameter that is left open; None where it has no default.

    >>> default("WarmupLR", "warmup_num_steps")
    1000
    """
    return getattr(_SCHEDULES[name], param, None)


def _readers(kind: type[RateSchedule]) -> dict[str, Any]:
    return {name: hint.__metadata__[0] for name, hint in get_type_hints(kind, include_extras=True).items()}


def build(
    name: str, settings: Mapping[str, Any], optimizer: torch.optim.Optimizer, total_steps: int | None = None
) -> LRScheduler:
    """The schedule `name` on an optimizer, from checked settings; `total_steps` is the default of `total_num_steps`.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    >>> build("WarmupLR", {"warmup_num_steps": 10, "warmup_type": "linear"}, optimizer).get_last_lr()
    [0.0]
    """
    kind, params = _SCHEDULES[name], dict(settings)
    if "total_num_steps" in _readers(kind) and params.setdefault("total_num_steps", total_steps) is None:
        raise ConfigError(
            f"scheduler {name}: params.total_num_steps was left open; give it in the configuration, or pass total_steps"
        )
    return FormulaLR(optimizer, kind(**params))


class FormulaLR(LRScheduler):
    """A torch scheduler whose rates (and for OneCycle momenta) are those of a schedule."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: RateSchedule) -> None:
        self._schedule = schedule
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        iteration = self.last_epoch + self._schedule.last_batch_iteration
        self._set_momenta(iteration)
        return [self._schedule.rate(iteration, float(base), group) for group, base in enumerate(self.base_lrs)]

    def _set_momenta(self, iteration: int) -> None:
        for number, group in enumerate(self.optimizer.param_groups):
            value = self._schedule.momentum(iteration, number)
            if value is None:
                return
            if "betas" in group:
                group["betas"] = (value, *group["betas"][1:])
            elif "momentum" in group:
                group["momentum"] = value

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "_last_lr": self._last_lr}
