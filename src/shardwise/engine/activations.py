"""What checkpoints keep for the backward, on the host: taken down in the forward, brought back one checkpoint ahead.

torch saves the inputs of a checkpoint as it saves any tensor for a backward, so its hooks for saved tensors see them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from shardwise.memory.ledger import Entry, Kind, Tier
from shardwise.offload.context import OffloadContext
from shardwise.offload.storage import HostStorage
from shardwise.offload.streams import PAST, Event

_ENTRY = Entry(Kind.WORK, "checkpoints", Tier.HOST)
_LEAST_BYTES = 1 << 12
"""What is smaller stays: it costs more to send than to keep."""


class ActivationStore:
    """The host memory for what checkpoints keep, used again from step to step."""

    def __init__(self, offload: OffloadContext) -> None:
        self.offload = offload
        self._idle: list[tuple[HostStorage, Event]] = []
        self._is_closed = False
        self._last: Callable[[], Kept | None] = lambda: None

    def keeping(self) -> AbstractContextManager[None]:
        """What is saved inside rests on the host."""
        return torch.autograd.graph.saved_tensors_hooks(self._keep, self._bring_back)

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor | Kept:
        leaves = tensor.requires_grad and not tensor.is_leaf and tensor.is_contiguous()
        if not leaves or tensor.nbytes < _LEAST_BYTES or tensor.device != self.offload.streams.device:
            return tensor
        kept = Kept(self, tensor)
        kept.before, self._last = self._last, weakref.ref(kept)
        return kept

    def _bring_back(self, kept: torch.Tensor | Kept) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        tensor = kept.take()
        if (ahead := kept.before()) is not None:
            ahead.fetch()
        return tensor

    def take(self, size_bytes: int) -> tuple[HostStorage, Event]:
        """Room for so much, and when it is free: the smallest idle storage that has it.

        Where none has, those that are idle go: inputs of ever new lengths take no more than the longest do.
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
        """Take a storage back, which is in use until `ready`."""
        self._idle.append((storage, ready))
        if self._is_closed:
            self._free_idle()

    def close(self) -> None:
        """Give the memory back, also what graphs that are still alive will give."""
        self._is_closed = True
        self._free_idle()

    def _free_idle(self) -> None:
        for storage, ready in self._idle:
            ready.synchronize()
            storage.free()
        self._idle.clear()


class Kept:
    """One tensor on the host, for as long as the graph lives that needs it; `before` it was another, if that lives."""

    before: Callable[[], Kept | None]

    def __init__(self, shelf: ActivationStore, tensor: torch.Tensor) -> None:
        self._shelf = shelf
        self._shape, self._dtype = tensor.shape, tensor.dtype
        self._here: torch.Tensor | None = None
        self._size_bytes = tensor.nbytes
        streams = shelf.offload.streams
        self._storage_of, ready = shelf.take(self._size_bytes)
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
        """Begin to bring it back."""
        if self._here is None:
            streams = self._shelf.offload.streams
            self._here = torch.empty(self._shape, dtype=self._dtype, device=streams.device)
            streams.h2d.wait(streams.now(), self._left)
            with streams.h2d:
                streams.copy_to_device(self._here, self._resting())
            self._came = streams.h2d.mark()

    def take(self) -> torch.Tensor:
        """It, on the device."""
        self.fetch()
        tensor, self._here = self._here, None
        assert tensor is not None
        self._shelf.offload.streams.wait(self._came)
        return tensor

    def __del__(self) -> None:
        if self._here is not None:
            # The copy into it may be under way: whoever gets this memory next comes after it.
            self._shelf.offload.streams.wait(self._came)
        self._shelf.give(self._storage_of, self._came)

    def _resting(self) -> torch.Tensor:
        return self._storage_of.tensor[: self._size_bytes].view(self._dtype).view(self._shape)
