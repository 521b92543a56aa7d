"""Replacements for methods of the user's optimizers that would bypass the engine."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch

from shardwise.errors import CheckpointError, GradientError, ModelChangedError
from shardwise.optim.optimizers import members

_MARK = "shardwise_shard"


class ShardMark(NamedTuple):
    """Which part of an optimizer's states a rank has: its place over the data-parallel ranks and in its copy of the
    model, how many parts there are along each, and its elements."""

    shard: int
    model_rank: int
    parts: int
    model_ranks: int
    numel: int


class OptimizerGuard:
    """Replaces methods on the instances. `step` always raises; until `remove`, so does `add_param_group`, and
    `zero_grad` of any of several joint optimizers calls `drop`, for all of them. A `state_dict` has the states of this
    rank's shard, so it is marked, and one with another mark or none is refused."""

    def __init__(self, optimizer: torch.optim.Optimizer, drop: Callable[[], None], mark: ShardMark) -> None:
        self._members = members(optimizer)
        self._drop = drop
        self._handles = [
            handle
            for each in self._members
            for handle in (
                each.register_state_dict_post_hook(lambda _, state: state.update({_MARK: list(mark)})),
                each.register_load_state_dict_pre_hook(lambda _, state: _check_mark(state, mark)),
            )
        ]
        for each in self._members:
            # A bound method: LR schedulers read its `__func__`.
            each.step = MethodType(_use_engine_step, each)  # type: ignore[method-assign]  # refuses
            each.add_param_group = _refuse_group  # type: ignore[method-assign]  # refuses
            each.zero_grad = self._zero_grad  # type: ignore[method-assign]  # drops
            # GradScaler then calls `step`, which refuses; else it ends in an assertion of its own.
            each._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # read by it

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for each in self._members:
            vars(each).pop("zero_grad", None)
            vars(each).pop("add_param_group", None)

    def _zero_grad(self, set_to_none: bool = True) -> None:
        self._drop()


def _check_mark(state: dict[str, Any], mark: ShardMark) -> None:
    found = state.get(_MARK)
    if found != list(mark):
        of = f"of shard {found[0]} of {found[2]}" if found is not None else "of an optimizer outside of an engine"
        raise CheckpointError(
            f"optimizer.load_state_dict() got the states {of}, and this rank has shard {mark.shard} of {mark.parts}, "
            f"{mark.numel} elements: optimizer.state_dict() has one rank's shard alone. Save and load with "
            "engine.save(folder) and engine.load(folder), which work at any number of ranks, or let every rank save "
            "and load a file of its own"
        )


def _use_engine_step(self: torch.optim.Optimizer, closure: Any = None) -> None:
    # What GradScaler sets around the call must not reach the next update.
    if vars(self).pop("grad_scale", None) is not None:
        vars(self).pop("found_inf", None)
        raise GradientError(
            "GradScaler.step() on an optimizer that works inside a shardwise engine: leave GradScaler out and set "
            "precision.compute: fp16, which scales the loss in engine.backward(loss), or compute in bf16"
        )
    raise GradientError(
        "optimizer.step() on an optimizer that works inside a shardwise engine: call engine.step() instead"
    )


def _refuse_group(param_group: dict[str, Any]) -> None:
    raise ModelChangedError(
        "optimizer.add_param_group() on an optimizer that works inside a shardwise engine, which would never update "
        "that group: make all groups before shardwise.initialize; parameters that are to train later can be frozen "
        "after it, with requires_grad_(False), and made trainable again"
    )


# What LR schedulers put on the step they wrap; they need not wrap this one, `Updater.finish` tells them of each step.
_use_engine_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # read by schedulers
