"""The learning-rate schedules of DeepSpeed's documentation: formulas of the iteration, and a torch scheduler of them.

A formula maps the iteration to a learning rate. Iteration -1 is the time before the first scheduler step, so the
first optimizer step uses the formula's value at -1.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from shardwise.config.values import choice, flag, left_open_out, nearest, one_of, real
from shardwise.errors import ConfigError
from shardwise.sizes import whole

Reader = Callable[[Any], Any]
Params = Mapping[str, Any]


def _rate(value: object) -> float:
    rate = real(value)
    if rate < 0:
        raise ValueError("expected a number >= 0")
    return rate


def _rates(value: object) -> float | tuple[float, ...]:
    """One rate, or one per parameter group."""
    return tuple(_rate(each) for each in value) if isinstance(value, list | tuple) else _rate(value)


def _positive(value: object) -> int:
    number = whole(value)
    if number < 1:
        raise ValueError("expected a whole number >= 1")
    return number


def _iteration(value: object) -> int:
    return -1 if value in (-1, "-1") else whole(value)


_WARMUP: dict[str, Reader] = {
    "warmup_num_steps": whole,
    "warmup_type": choice("log", "linear"),
    "last_batch_iteration": _iteration,
}
_LINEAR = _WARMUP | {"warmup_min_lr": _rates, "warmup_max_lr": _rates}

PARAMS: dict[str, dict[str, Reader]] = {
    "WarmupLR": _LINEAR,
    "WarmupDecayLR": _LINEAR | {"total_num_steps": _positive},
    "WarmupCosineLR": _WARMUP | {"total_num_steps": _positive, "warmup_min_ratio": _rate, "cos_min_ratio": _rate},
    "OneCycle": {
        "cycle_min_lr": _rate,
        "cycle_max_lr": _rate,
        "decay_lr_rate": _rate,
        "cycle_first_step_size": _positive,
        "cycle_second_step_size": _positive,
        "cycle_first_stair_count": whole,
        "cycle_second_stair_count": whole,
        "decay_step_size": whole,
        "cycle_momentum": flag,
        "cycle_min_mom": _rate,
        "cycle_max_mom": _rate,
        "decay_mom_rate": _rate,
        "last_batch_iteration": _iteration,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": _rates,
        "lr_range_test_step_size": _positive,
        "lr_range_test_step_rate": _rate,
        "lr_range_test_staircase": flag,
        "last_batch_iteration": _iteration,
    },
}


def check(name: str, params: Params) -> tuple[str, dict[str, Any]]:
    """The canonical name of a schedule and its parameters in their types; ValueError if either is wrong."""
    found = {known.lower(): known for known in PARAMS}.get(name.strip().lower())
    if found is None:
        raise ValueError(f"name {name!r}: expected {one_of(PARAMS)}{nearest(name, PARAMS)}")
    readers, result = PARAMS[found], {}
    for key, value in left_open_out(params).items():
        if key not in readers:
            raise ValueError(f"params.{key}: unknown key of {found}{nearest(key, readers)}")
        try:
            result[key] = readers[key](value)
        except ValueError as error:
            raise ValueError(f"params.{key} = {value!r}: {error}") from None
    return found, result


def build(name: str, settings: Params, optimizer: torch.optim.Optimizer, total_steps: int | None = None) -> LRScheduler:
    """The schedule `name` on an optimizer, from checked settings; `total_steps` is the default of `total_num_steps`.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    >>> build("WarmupLR", {"warmup_num_steps": 10, "warmup_type": "linear"}, optimizer).get_last_lr()
    [0.0]
    """
    params = dict(settings)
    if "total_num_steps" in PARAMS[name] and params.setdefault("total_num_steps", total_steps) is None:
        raise ConfigError(
            f"scheduler {name}: params.total_num_steps was left open; give it in the configuration, or pass total_steps"
        )
    return FormulaLR(optimizer, name, params)


class FormulaLR(LRScheduler):
    """A torch scheduler whose rates (and for OneCycle momenta) are formulas of the iteration."""

    def __init__(self, optimizer: torch.optim.Optimizer, name: str, params: dict[str, Any]) -> None:
        first = params.pop("last_batch_iteration", -1)
        bases = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
        self._offset = first
        self._rates = [rate(name, params, float(base), i) for i, base in enumerate(bases)]
        self._momentum = momentum(params, 0) if name == "OneCycle" else None
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        iteration = self.last_epoch + self._offset
        if self._momentum is not None:
            self._set_momentum(self._momentum(iteration))
        return [rate(iteration) for rate in self._rates]

    def _set_momentum(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            if "betas" in group:
                group["betas"] = (value, *group["betas"][1:])
            elif "momentum" in group:
                group["momentum"] = value

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "_last_lr": self._last_lr}


def rate(name: str, params: Params, base: float, group: int) -> Callable[[int], float]:
    """The learning rate as a function of the iteration, for a parameter group with the rate `base`."""
    formulas: dict[str, Callable[[Params, float, int], Callable[[int], float]]] = {
        "WarmupLR": _warmup,
        "WarmupDecayLR": _warmup_decay,
        "WarmupCosineLR": _warmup_cosine,
        "OneCycle": _one_cycle,
        "LRRangeTest": _range_test,
    }
    return formulas[name](params, base, group)


def _number(params: Params, key: str, default: float) -> float:
    return float(params.get(key, default))


def _of_group(value: float | tuple[float, ...], group: int) -> float:
    if isinstance(value, tuple):
        if group >= len(value):
            raise ConfigError(f"the schedule has {len(value)} learning rates for more parameter groups")
        return value[group]
    return value


def _ramp(params: Params) -> tuple[int, Callable[[int], float]]:
    """The number of warm-up steps, and the rise from 0 to 1 during them."""
    count = max(2, params.get("warmup_num_steps", 1000))
    if params.get("warmup_type", "log") == "linear":
        return count, lambda i: i / count
    return count, lambda i: math.log(i + 1) / math.log(count)


def _warmup(params: Params, base: float, group: int) -> Callable[[int], float]:
    return _between(params, group, after=lambda i: 1.0)


def _warmup_decay(params: Params, base: float, group: int) -> Callable[[int], float]:
    total, (count, _) = params["total_num_steps"], _ramp(params)
    return _between(params, group, after=lambda i: max(0.0, (total - i) / max(1.0, total - count)))


def _between(params: Params, group: int, after: Callable[[int], float]) -> Callable[[int], float]:
    low = _of_group(params.get("warmup_min_lr", 0.0), group)
    high = _of_group(params.get("warmup_max_lr", 0.001), group)
    count, rise = _ramp(params)
    return lambda i: low + (high - low) * (0.0 if i < 0 else rise(i) if i < count else after(i))


def _warmup_cosine(params: Params, base: float, group: int) -> Callable[[int], float]:
    low, floor = _number(params, "warmup_min_ratio", 0.0), _number(params, "cos_min_ratio", 0.0001)
    count, rise = _ramp(params)
    decay_steps = max(1, params["total_num_steps"] - count)

    def ratio(i: int) -> float:
        if i < count:
            return low + (1 - low) * rise(i) if i >= 0 else 0.0
        cosine = (1 + math.cos(math.pi * min(1.0, (i - count + 1) / decay_steps))) / 2
        return floor + (1 - floor) * cosine

    return lambda i: base * ratio(i)


def _one_cycle(params: Params, base: float, group: int) -> Callable[[int], float]:
    low, high = _number(params, "cycle_min_lr", base / 10), _number(params, "cycle_max_lr", base)
    decay = _number(params, "decay_lr_rate", 0.0)

    def value(i: int) -> float:
        past = _past_cycle(params, i)
        return low + (high - low) * _cycle(params, i) if past is None else low / (1 + decay * past)

    return value


def momentum(params: Params, group: int) -> Callable[[int], float] | None:
    """The momentum of OneCycle, which falls as the rate rises; None where it is not cycled."""
    if not params.get("cycle_momentum", True):
        return None
    low, high = _number(params, "cycle_min_mom", 0.8), _number(params, "cycle_max_mom", 0.9)
    decay = _number(params, "decay_mom_rate", 0.0)

    def value(i: int) -> float:
        past = _past_cycle(params, i)
        return high - (high - low) * _cycle(params, i) if past is None else min(high * (1 + decay * past), 0.9999)

    return value


def _halves(params: Params) -> tuple[int, int]:
    first = params.get("cycle_first_step_size", 2000)
    return first, params.get("cycle_second_step_size", first)


def _cycle(params: Params, i: int) -> float:
    """The height of the cycle's triangle at iteration `i`, from 0 to 1, in stairs where they are configured."""
    first, second = _halves(params)
    step = i + 1
    up = step <= first
    height = step / first if up else max(0.0, (first + second - step) / second)
    first_stairs = params.get("cycle_first_stair_count", 0)
    stairs = first_stairs if up else params.get("cycle_second_stair_count", first_stairs)
    return math.floor(height * stairs) / stairs if stairs else height


def _past_cycle(params: Params, i: int) -> float | None:
    """Decay intervals since the end of the cycle; None during the cycle."""
    over = i + 1 - sum(_halves(params))
    if over < 0:
        return None
    size = params.get("decay_step_size", 0)
    return over / size if size else 0.0


def _range_test(params: Params, base: float, group: int) -> Callable[[int], float]:
    low = _of_group(params.get("lr_range_test_min_lr", 1e-3), group)
    size, slope = _number(params, "lr_range_test_step_size", 2000), _number(params, "lr_range_test_step_rate", 1.0)
    stairs = params.get("lr_range_test_staircase", False)

    def value(i: int) -> float:
        interval = (i + 1) / size
        return low * (1 + slope * (math.floor(interval) if stairs else interval))

    return value
