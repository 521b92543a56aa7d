"""Tensors that autograd saves for a backward, where they may be in the buffer of a unit that is released meanwhile.

Autograd's hooks on saved tensors see each of them when it is saved and when the backward reads it. A tensor in a unit's
buffer is saved as it is: the buffer is allocated and gathered again before it is read. With such hooks, autograd does
not check that a saved tensor was not written in place since; `Saved` does, with the same error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

from shardwise.partition.dtensors import local


class Saved(NamedTuple):
    """A tensor, and how often it had been written in place when it was saved."""

    tensor: torch.Tensor
    version: int

    def read(self) -> torch.Tensor:
        """The tensor, unless it was written since."""
        tensor, now = self.tensor, self.tensor._version
        if now != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(tensor.shape)}] is at version {now}; expected version {self.version} instead"
            )
        return tensor


class Buffered(Protocol):
    """The weights of a unit, in whose buffer a saved tensor may be."""

    generation: int

    @property
    def storage_id(self) -> int:
        """An identifier of the buffer's storage."""

    def need(self, generation: int) -> None:
        """A backward reads values that were saved in this generation: gather them if they are released."""


class _SavedWeight(NamedTuple):
    saved: Saved
    weights: Buffered
    generation: int


def save(tensor: torch.Tensor) -> Saved:
    """Save a tensor that is in no unit's buffer."""
    # Detached: a graph that holds an output of its own is never freed, unless a backward frees what it saved.
    return Saved(tensor.detach(), tensor._version)


def following(weights: Iterable[Buffered]) -> contextlib.AbstractContextManager[Any]:
    """Within it, a backward of what is computed gathers the weights again. Hooks of the user are left alone, and so are
    the transforms of torch.func, which allow none."""
    by_storage = {each.storage_id: each for each in weights}
    if not by_storage or not torch.is_grad_enabled() or has_other_hooks():
        return contextlib.nullcontext()
    return saved_tensors_hooks(partial(_pack, by_storage), _unpack)


def has_other_hooks() -> bool:
    """Whether hooks on saved tensors are set already, or not allowed."""
    hooks: Any = torch._C._autograd
    return not hooks._saved_tensors_hooks_is_enabled() or hooks._top_saved_tensors_default_hooks(True) is not None


def storage_of(tensor: torch.Tensor) -> int:
    """An identifier of the storage of a tensor; 0 for one that shows none, as in torch.func or of a sparse layout."""
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return int(local(tensor).untyped_storage()._cdata)
        except NotImplementedError:
            return 0


def _pack(by_storage: dict[int, Buffered], tensor: torch.Tensor) -> Any:
    weights = by_storage.get(storage_of(tensor))
    if weights is None:
        return save(tensor)
    return _SavedWeight(Saved(tensor, tensor._version), weights, weights.generation)


def _unpack(packed: Any) -> torch.Tensor:
    if isinstance(packed, _SavedWeight):
        packed.weights.need(packed.generation)
        packed = packed.saved
    tensor: torch.Tensor = packed.read()
    return tensor
