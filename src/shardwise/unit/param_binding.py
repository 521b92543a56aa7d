"""What the parameters of a unit point to: views of its full buffer while gathered, and stand-ins while released.

A stand-in is NaN (0 for integers), expanded to the shape of its parameter. Users can point a parameter elsewhere with
`param.data = ...`, which is found by comparing addresses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.errors import ModelChangedError
from shardwise.memory import Buffer
from shardwise.partition.dtensors import local, locals_of, set_dtype
from shardwise.partition.stored import rebind_copies
from shardwise.tensors import blank
from shardwise.unit.param_guard import PLAINLY
from shardwise.unit.plan import UnitPlan

_ADDRESS = torch.Tensor.data_ptr


class ParamBinding:
    """Binds `params`, laid out as `plan` says, to views of `full` or to stand-ins."""

    def __init__(self, plan: UnitPlan, params: Sequence[torch.Tensor], full: Buffer) -> None:
        self._params = params
        self._locals = locals_of(params)
        self._names = [slot.spec.name for slot in plan.layout.slots]
        self._views = full.views(plan.layout)
        nothing = blank(plan.policy.weight_dtype, full.tensor.device)
        self._stand_ins = [nothing.expand(slot.spec.shape) for slot in plan.layout.slots]
        self._bound: Sequence[torch.Tensor] = self._views
        self.is_fake = type(full.tensor) is not torch.Tensor
        """Whether these are the fake tensors of a dry run, which have no address."""

    def bind_views(self) -> None:
        self._bind(self._views)

    def bind_stand_ins(self) -> None:
        self._bind(self._stand_ins)

    def _bind(self, tensors: Sequence[torch.Tensor]) -> None:
        self._bound = tensors
        with PLAINLY():  # guarded parameters would ask first
            for param, tensor in zip(self._locals, tensors, strict=True):
                param.data = tensor

    def adopt(self, dtype: torch.dtype) -> None:
        """Bind the parameters, which get this dtype, and copies that wrappers hold of them, to views."""
        for param in self._params:
            set_dtype(param, dtype)
        self._locals = locals_of(self._params)
        self.bind_views()
        for param, view in zip(self._params, self._views, strict=True):
            rebind_copies(param, view)

    def error(self) -> ModelChangedError | None:
        """What to raise for a parameter to which the user has given other storage; None if there is none."""
        for name, _, _ in self._rebound():
            return ModelChangedError(
                f"{name!r} was given other storage (`param.data = ...`), which the engine neither updates nor saves: "
                "assign inside `with shardwise.gathered(params, write=True):`, and resize before shardwise.initialize"
            )
        return None

    def reclaim(self) -> None:
        """Copy what the user has put into storage of its own to where the engine has the values, and bind the
        parameters to that again."""
        for name, param, tensor in self._rebound():
            values = local(param)
            if values.shape != tensor.shape:
                raise ModelChangedError(
                    f"{name!r} has the shape {tuple(values.shape)} now and had {tuple(tensor.shape)}: resize before "
                    "shardwise.initialize; copy.deepcopy(engine.module) gives a plain model to resize"
                )
            tensor.copy_(values.detach())
            values.data = tensor

    def _rebound(self) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """The parameters that are not where the engine has put them: name, parameter, and that place."""
        if self.is_fake:
            return []
        with PLAINLY():
            if list(map(_ADDRESS, locals_of(self._params))) == list(map(_ADDRESS, self._bound)):
                return []
            bound = zip(self._names, self._params, self._bound, strict=True)
            return [(name, param, at) for name, param, at in bound if _ADDRESS(local(param)) != _ADDRESS(at)]
