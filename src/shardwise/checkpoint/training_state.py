"""What a checkpoint holds besides tensors of the model, checked before an engine takes it over.

Counters and loss scale have a schema. Options of parameter groups and the state of a learning-rate schedule belong to
objects of the user: what is stored has to be of the kind that these objects hold now.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, InstanceOf, StrictBool

from shardwise.checkpoint.manifest import Count, Manifest
from shardwise.checkpoint.plain import rng_states, scalar_dtype, set_rng_states
from shardwise.errors import CheckpointError

# Options of groups and entries of schedules that no optimizer or schedule has below zero.
_NOT_NEGATIVE = {
    *("lr", "initial_lr", "max_lr", "min_lr", "base_lrs", "_last_lr", "weight_decay", "eps", "betas", "momentum"),
    *("dampening", "max_momentum", "base_momentum", "_step_count"),
}
_STEP_DTYPES = ("float32", "float64", "int32", "int64")
_EACH_GROUP = ("base_lrs", "_last_lr")


def _scalar(least: float, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    def check(value: torch.Tensor) -> torch.Tensor:
        if value.ndim or value.dtype != dtype or not least <= value.item() < math.inf:
            raise ValueError(f"expected a number of at least {least:g}, found {value}")
        return value

    return check


class LossScaleState(BaseModel):
    """The loss scale in fp16, and its counters."""

    scale: Annotated[InstanceOf[torch.Tensor], AfterValidator(_scalar(1e-30, torch.float32))]
    good_steps: Annotated[InstanceOf[torch.Tensor], AfterValidator(_scalar(0, torch.int32))]
    patience: Annotated[InstanceOf[torch.Tensor], AfterValidator(_scalar(0, torch.int32))]


class TrainingState(BaseModel):
    """The counters of training, the options of the parameter groups, and the learning-rate schedule."""

    model_config = ConfigDict(extra="allow")

    steps: Count
    skipped_steps: Count
    was_skipped: StrictBool
    is_exhausted: StrictBool
    scaler: LossScaleState | None
    averages: dict[str, Count] = {}
    groups: list[dict[str, Any]] | None
    lr_scheduler: dict[str, Any] | None


def check_groups(groups: Sequence[Mapping[str, Any]], optimizer: torch.optim.Optimizer, source: str) -> None:
    """Raise a CheckpointError unless the options can be those of the optimizer's parameter groups."""
    for number, (stored, group) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        for key, value in stored.items():
            current = group.get(key)
            has_each = not isinstance(current, list | tuple) or (
                isinstance(value, list | tuple) and len(value) == len(current)
            )
            if key == "params" or not has_each or not _fits(key, value, current):
                seen = f"{reprlib.repr(value)}, where the optimizer has {reprlib.repr(current)}"
                raise CheckpointError(f"{source}: {key} of parameter group {number} is {seen}: load another checkpoint")


def check_schedule(stored: Mapping[str, Any], scheduler: Any, groups: int, source: str) -> None:
    """Raise a CheckpointError unless `stored` can be the state of this learning-rate scheduler."""
    current = scheduler.state_dict()
    # Attributes of a user's class may change their kind, from False to None or from a number to a name.
    is_torchs = type(scheduler).__module__.startswith("torch.")
    for key, value in stored.items():
        is_method = callable(getattr(type(scheduler), key, None))
        has_each = key not in _EACH_GROUP or (isinstance(value, list) and len(value) == groups)
        is_checked = is_torchs or key == "last_epoch" or key in _NOT_NEGATIVE
        if is_method or not has_each or (is_checked and not _fits(key, value, current.get(key))):
            seen = f"{reprlib.repr(value)}, where {type(scheduler).__name__} has {reprlib.repr(current.get(key))}"
            raise CheckpointError(
                f"{source}: {key} of the learning-rate scheduler is {seen}: give the scheduler that the checkpoint was "
                "saved with"
            )


def check_extra(key: str, value: Any, where: str) -> None:
    """Raise a CheckpointError unless `value` can be state of an optimizer that is not one value per element."""
    if isinstance(value, str) or (key == "step" and not (_is_number(value) and float(value) >= 0)):
        raise CheckpointError(f"{where} is {reprlib.repr(value)}: load another checkpoint")


def check_steps(manifest: Manifest, states: Mapping[str, Collection[str]], source: str) -> None:
    """Raise a CheckpointError unless parameters with the same optimizer `states` all count steps in the same way."""
    first: dict[tuple[Any, ...], tuple[str, str | None]] = {}
    for name, param in manifest.params.items():
        dtype = scalar_dtype(param.extras.get("step"))
        other, counted = first.setdefault((param.group, *sorted(states[name])), (name, dtype))
        if dtype != counted or dtype not in (None, *_STEP_DTYPES):
            raise CheckpointError(
                f"{source}: the optimizer counts the steps of {other!r} as {counted} and those of {name!r} as {dtype}: "
                "load another checkpoint"
            )


def check_rng_states(states: Any, device: torch.device, source: str) -> None:
    """Raise a CheckpointError unless the generators accept their states; leaves the generators as they are."""
    before = rng_states(device)
    try:
        set_rng_states(states, device)
    except Exception as error:
        raise CheckpointError(
            f"{source}: the states of the random number generators are not valid ({error}): load another checkpoint"
        ) from None
    finally:
        set_rng_states(before, device)


def _fits(key: str, stored: Any, current: Any) -> bool:
    """Whether `stored` is of the kind of `current`, which is None if anything may be."""
    if key in _NOT_NEGATIVE and not _is_not_negative(stored):
        return False
    if current is None:
        return key not in _NOT_NEGATIVE or stored is None or _is_numeric(stored)
    if isinstance(current, bool | str):
        return isinstance(stored, type(current))
    if _is_number(current):
        return _is_number(stored)
    if isinstance(current, list | tuple):
        pairs = zip(stored, current, strict=False) if isinstance(stored, list | tuple) else ((None, 0),)
        return all(_fits("", one, other) for one, other in pairs)
    if isinstance(current, Mapping):
        return isinstance(stored, Mapping) and all(
            _fits(str(name), stored[name], value) for name, value in current.items() if name in stored
        )
    return isinstance(stored, torch.Tensor) == isinstance(current, torch.Tensor)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.dtype != torch.bool
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_numeric(value: Any) -> bool:
    return all(map(_is_numeric, value)) if isinstance(value, list | tuple) else value is None or _is_number(value)


def _is_not_negative(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_not_negative, value))
    return not _is_number(value) or 0 <= float(value) < math.inf
