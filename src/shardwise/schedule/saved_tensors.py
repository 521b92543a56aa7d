"""The first training forward is watched more closely: for backwards that begin where no output is.

A tensor that a module leaves neither among its outputs nor in its attributes (a loss appended to a global list, what a
hook of the user's caught) may begin a backward inside the module before its outputs are reached, with the weights
released. Only autograd's hooks on saved tensors see that, and they cost a call for each of them. So the first forward
is run under such hooks; they gather what a backward finds released, and if one did, they stay for good.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.autograd.graph import saved_tensors_hooks

from shardwise.unit.unit import Unit
from shardwise.unit.weights import WeightsState


class _Saved(NamedTuple):
    """A tensor in a unit's buffer that a backward will want."""

    tensor: torch.Tensor
    unit: Unit


class SavedTensorGuard:
    """Watches forwards until one backward has shown that it need not."""

    def __init__(self, units: Sequence[Unit], bring: Callable[[Unit], None]) -> None:
        self._units = {unit.weights.storage_id: unit for unit in units if unit.weights.policy.weights_sharded}
        self._bring = bring
        self._is_watching = bool(self._units)
        self._is_needed = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around a forward. Another's hooks on saved tensors are left alone."""
        if not self._is_watching or not torch.is_grad_enabled() or _others_watch():
            yield
        else:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield

    def end(self) -> None:
        """A backward is over."""
        self._is_watching = self._is_needed

    def _pack(self, tensor: torch.Tensor) -> Any:
        unit = self._units.get(tensor.untyped_storage()._cdata)
        return tensor if unit is None else _Saved(tensor, unit)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Saved):
            return cast(torch.Tensor, packed)
        if packed.unit.weights.state is not WeightsState.READY:
            self._is_needed = True
            self._bring(packed.unit)
        return packed.tensor


def _others_watch() -> bool:
    hooks: Any = torch._C._autograd
    return not hooks._saved_tensors_hooks_is_enabled() or hooks._top_saved_tensors_default_hooks(True) is not None
