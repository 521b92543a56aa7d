"""Activation checkpointing by configuration: each block's forward is recomputed in its backward.

A single layer (an embedding, a head) is not recomputed: its input would be saved all the same. With
`checkpointing.offload`, what checkpoints save rests on the host: it is copied there in the forward, and back one
checkpoint ahead of its use. torch saves the inputs of a checkpoint as it saves any tensor for a backward, so hooks on
saved tensors see them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.config.sections import Checkpointing
from shardwise.memory import Entry, Kind, Tier
from shardwise.offload.context import OffloadContext
from shardwise.offload.storage import HostStorage
from shardwise.offload.streams import PAST, Event
from shardwise.unit import Unit

_ENTRY = Entry(Kind.WORK, "checkpoints", Tier.HOST)
_LEAST_BYTES = 1 << 12
"""Smaller tensors stay on the device: they cost more to copy than to keep."""


class Recompute:
    """Wraps the forward of each unit's modules, inside the hooks: the recomputation sees the gathered weights."""

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], settings: Checkpointing, offload: OffloadContext
    ) -> None:
        self._store = ActivationStore(offload) if settings.offload else None
        self._wrapped: list[nn.Module] = []
        first_runs = [unit.spec.runs[0] for unit in units if unit.spec.runs] if settings.enabled else []
        for path in dict.fromkeys(path for run in first_runs for path in run if path):
            module = model.get_submodule(path)
            if any(True for _ in module.children()):
                module.forward = partial(_recomputed, module.forward, self._store)
                self._wrapped.append(module)

    def remove(self) -> None:
        for module in self._wrapped:
            del module.forward
        if self._store is not None:
            self._store.close()


def _recomputed(inner: Callable[..., Any], store: ActivationStore | None, *args: Any, **kwargs: Any) -> Any:
    with contextlib.nullcontext() if store is None else store.saving():
        return checkpoint(inner, *args, use_reentrant=False, **kwargs)


class ActivationStore:
    """The host memory for what checkpoints save, reused from step to step."""

    def __init__(self, offload: OffloadContext) -> None:
        self.offload = offload
        self._idle: list[tuple[HostStorage, Event]] = []
        self._is_closed = False
        self._last: Callable[[], OffloadedActivation | None] = lambda: None

    def saving(self) -> contextlib.AbstractContextManager[None]:
        """What is saved inside rests on the host."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | OffloadedActivation:
        leaves = tensor.requires_grad and not tensor.is_leaf and tensor.is_contiguous()
        if not leaves or tensor.nbytes < _LEAST_BYTES or tensor.device != self.offload.streams.device:
            return tensor
        saved = OffloadedActivation(self, tensor, self._last)
        self._last = weakref.ref(saved)
        return saved

    def _unpack(self, saved: torch.Tensor | OffloadedActivation) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        tensor = saved.take()
        if (ahead := saved.before()) is not None:
            ahead.fetch()
        return tensor

    def take(self, size_bytes: int) -> tuple[HostStorage, Event]:
        """Memory of that size, and when it is free: the smallest idle storage that is large enough.

        If there is none, the idle ones are freed: inputs of changing lengths take no more memory than the longest.
        """
        fitting = [entry for entry in self._idle if entry[0].size_bytes >= size_bytes]
        if fitting:
            entry = min(fitting, key=lambda entry: entry[0].size_bytes)
            self._idle.remove(entry)
            return entry
        self._free_idle()
        offload = self.offload
        return HostStorage(offload.ledger, _ENTRY, size_bytes, torch.uint8, offload.host), PAST

    def give(self, storage: HostStorage, ready: Event) -> None:
        """Take back a storage that is in use until `ready`."""
        self._idle.append((storage, ready))
        if self._is_closed:
            self._free_idle()

    def close(self) -> None:
        """Free the memory, also what graphs that are still alive will give back."""
        self._is_closed = True
        self._free_idle()

    def _free_idle(self) -> None:
        for storage, ready in self._idle:
            ready.synchronize()
            storage.free()
        self._idle.clear()


class OffloadedActivation:
    """One tensor on the host, for as long as the graph that needs it lives; `before` is the one saved before it."""

    def __init__(
        self, store: ActivationStore, tensor: torch.Tensor, before: Callable[[], OffloadedActivation | None]
    ) -> None:
        self.before = before
        self._store = store
        self._shape, self._dtype = tensor.shape, tensor.dtype
        self._here: torch.Tensor | None = None
        self._size_bytes = tensor.nbytes
        streams = store.offload.streams
        self._storage, ready = store.take(self._size_bytes)
        streams.d2h.wait(streams.now(), ready)
        with streams.d2h:
            streams.copy_to_host(self._resting(), tensor.detach())
        self._left = self._came = streams.d2h.mark()
        leaving = [tensor.detach()]
        version = tensor._version

        def free() -> None:
            if leaving.pop()._version != version:
                raise RuntimeError(
                    "an input of a checkpointed block was changed in place after the block had run: with "
                    "checkpointing.offload it may have been on its way to the host; write `x = x + y`, not `x += y`"
                )

        streams.free_after(self._left, free)

    def fetch(self) -> None:
        """Start to copy it back."""
        if self._here is None:
            streams = self._store.offload.streams
            self._here = torch.empty(self._shape, dtype=self._dtype, device=streams.device)
            streams.h2d.wait(streams.now(), self._left)
            with streams.h2d:
                streams.copy_to_device(self._here, self._resting())
            self._came = streams.h2d.mark()

    def take(self) -> torch.Tensor:
        """The tensor, on the device."""
        self.fetch()
        tensor, self._here = self._here, None
        assert tensor is not None
        self._store.offload.streams.wait(self._came)
        return tensor

    def __del__(self) -> None:
        if self._here is not None:
            # The copy into it may be in flight: the memory's next user must be ordered after it.
            self._store.offload.streams.wait(self._came)
        self._store.give(self._storage, self._came)

    def _resting(self) -> torch.Tensor:
        return self._storage.tensor[: self._size_bytes].view(self._dtype).view(self._shape)
