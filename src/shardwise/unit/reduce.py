"""A reduction in flight: parts out to their owners, parts in from every rank, added up in rank order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import nn

from shardwise.comm.comm import DONE, Comm, Handle
from shardwise.memory.ledger import Buffer, Entry, Kind, Ledger, Tier
from shardwise.partition.layout import Layout, Span

_BLOCK_NUMEL = 1 << 16
"""Elements summed at a time on the CPU: 256 KiB of fp32, so that a block stays in the cache."""

Blocks = Callable[[torch.Tensor], Sequence[torch.Tensor]]
"""Cuts a tensor into blocks that are worked on one after the other."""

PLAINLY = torch._C.DisableTorchFunctionSubclass
"""Within it, watched parameters (see `pending`) are plain: their `grad` is looked at without a call into Python."""


class Packing:
    """A buffer laid out as the unit is, into which the gradients of its parameters are copied in one operation."""

    def __init__(self, buffer: Buffer, layout: Layout) -> None:
        self.buffer = buffer
        self.views = buffer.views(layout)

    def fill(self, params: Sequence[nn.Parameter]) -> None:
        """Copy every gradient into place; zeros where there is none, and in between."""
        grads = _grads_of(params)
        places, blanks = self.views, self.buffer.gaps
        present = [grad for grad in grads if grad is not None]
        if len(present) < len(grads):
            blanks = blanks + [view for view, grad in zip(places, grads, strict=True) if grad is None]
            places = [view for view, grad in zip(places, grads, strict=True) if grad is not None]
        if present:
            torch._foreach_copy_(places, present)
        if blanks:
            torch._foreach_zero_(blanks)

    def add(self, params: Sequence[nn.Parameter]) -> None:
        """Add every gradient in place."""
        pairs = [(view, grad) for view, grad in zip(self.views, _grads_of(params), strict=True) if grad is not None]
        if pairs:
            torch._foreach_add_([view for view, _ in pairs], [grad for _, grad in pairs])


def _grads_of(params: Sequence[nn.Parameter]) -> list[torch.Tensor | None]:
    """As plain values: a backward that makes a graph of its own leaves gradients with a history."""
    with PLAINLY():
        grads = [param.grad for param in params]
    if not torch.is_grad_enabled():
        return grads
    return [grad if grad is None else grad.detach() for grad in grads]


class Source(Protocol):
    """Gradients to send, seen as [W, shard]."""

    def whole(self, dtype: torch.dtype) -> torch.Tensor | None:
        """All of them in one tensor, if they can be had so."""

    def pack(self, sent: torch.Tensor, start: int, stop: int) -> None:
        """Copy the columns from `start` to `stop` of every shard."""

    def packed(self) -> None:
        """Everything is in buffers: let go of what is not needed any more."""

    def sent(self) -> None:
        """Everything is sent: free what `whole` gave."""


class FlatGrads:
    """Gradients in the unit's flat buffer."""

    def __init__(self, shards: torch.Tensor) -> None:
        self._shards = shards

    def whole(self, dtype: torch.dtype) -> torch.Tensor | None:
        return self._shards if self._shards.dtype == dtype else None

    def pack(self, sent: torch.Tensor, start: int, stop: int) -> None:
        sent.copy_(self._shards[:, start:stop])

    def packed(self) -> None:
        pass

    def sent(self) -> None:
        pass


class AutogradGrads:
    """Gradients as autograd keeps them, each in its parameter's `grad`; `packing` is where they are laid out."""

    def __init__(
        self, params: Sequence[nn.Parameter], layout: Layout, packing: Packing, let_go: Callable[[], None]
    ) -> None:
        self._params = params
        self._layout = layout
        self._packing = packing
        self.packed = let_go

    def whole(self, dtype: torch.dtype) -> torch.Tensor | None:
        flat = self._packing.buffer.allocate()
        self._packing.fill(self._params)
        return flat.view(self._layout.world_size, -1)

    def pack(self, sent: torch.Tensor, start: int, stop: int) -> None:
        for rank, row in enumerate(sent):
            _lay_out(row, Span(start, stop).shift(rank * self._layout.shard_numel), self._params, self._layout)

    def sent(self) -> None:
        self._packing.buffer.free()


def _lay_out(target: torch.Tensor, wanted: Span, params: Sequence[nn.Parameter], layout: Layout) -> None:
    """Lay the gradients of `params` that fall into `wanted` of the flat buffer side by side, zeros in between."""
    target.zero_()
    for slot, param in zip(layout.slots, params, strict=True):
        part = slot.span.intersect(wanted)
        if part and param.grad is not None:
            flat = param.grad.detach().reshape(-1)
            target[part.shift(-wanted.start).slice] = flat[part.shift(-slot.span.start).slice]


class ReduceScatter:
    """One reduction in flight: parts out to their owners, parts in from every rank, added up in rank order.

    Gradients that lie in one flat buffer are sent from there; others are packed first, all at once or in pieces.
    """

    def __init__(
        self, name: str, source: Source, layout: Layout, dtype: torch.dtype, pieces: int, ledger: Ledger
    ) -> None:
        self._name = name
        self._source = source
        self._world_size = layout.world_size
        self._dtype = dtype
        self._ledger = ledger
        self._handle: Handle = DONE
        self._sent: Buffer | None = None
        self._received: Buffer | None = None
        self._rows: Sequence[torch.Tensor] = ()
        step = max(1, -(-layout.shard_numel // pieces))
        self._cuts = [(start, min(start + step, layout.shard_numel)) for start in range(0, layout.shard_numel, step)]

    def start(self, comm: Comm) -> None:
        """Issue the first piece."""
        if self._cuts:
            self._issue(comm, *self._cuts[0])
        else:
            self._source.packed()

    def finish(self, comm: Comm, target: Callable[[], tuple[torch.Tensor, bool]]) -> None:
        """Wait for each piece, write its mean to `target` (or add it), and issue the next.

        The target is asked for once the first piece has arrived and its send buffer is gone, so that a shard to be
        held takes that buffer's place: test_memory's one-unit models would be upside down otherwise.
        """
        place: tuple[torch.Tensor, bool] | None = None
        for index, (start, stop) in enumerate(self._cuts):
            if index:
                self._issue(comm, start, stop)
            self._handle.wait()
            if self._received is not None and comm.rows_received == self._world_size:
                self._drop_sent()
            tensor, adds = place = place or target()
            self._add_up(tensor[start:stop], adds, comm)
            self.abandon()
        if place is None:
            target()

    def _add_up(self, piece: torch.Tensor, adds: bool, comm: Comm) -> None:
        block = block_numel(piece.numel(), comm.kernels)
        block_bytes = _sum_bytes(piece, block) if self._dtype != torch.float32 else 0
        with self._ledger.passing("exchange", Tier.DEVICE, block_bytes):
            _mean_in_rank_order(self._rows, piece, adds, partial(comm.blocks, block_numel=block))

    def abandon(self) -> None:
        """Wait, and free the buffers."""
        self._handle.wait()
        self._handle = DONE
        self._rows = ()
        self._drop_sent()
        if self._received is not None:
            self._received.free()
            self._received = None

    def _issue(self, comm: Comm, start: int, stop: int) -> None:
        parts = self._pack(comm, start, stop)
        self._rows = list(parts)
        if stop == self._cuts[-1][1]:
            self._source.packed()
        if self._world_size > 1:
            shape = (comm.rows_received, stop - start)
            self._received = self._buffer(comm, shape)
            received = self._received.allocate().view(shape)
            # Pieces have names of their own: what follows what must be the same in every step (`agreement`).
            name = self._name if len(self._cuts) == 1 else f"{self._name} from {start}"
            self._handle, self._rows = comm.exchange(received, parts, "reduce", name)

    def _pack(self, comm: Comm, start: int, stop: int) -> torch.Tensor:
        parts = self._source.whole(self._dtype) if len(self._cuts) == 1 else None
        if parts is None:
            shape = (self._world_size, stop - start)
            self._sent = self._buffer(comm, shape)
            parts = self._sent.allocate().view(shape)
            self._source.pack(parts, start, stop)
        return parts

    def _buffer(self, comm: Comm, shape: tuple[int, int]) -> Buffer:
        entry = Entry(Kind.WORK, "exchange", Tier.DEVICE)
        return Buffer(self._ledger, entry, shape[0] * shape[1], self._dtype, comm.device)

    def _drop_sent(self) -> None:
        self._source.sent()
        if self._sent is not None:
            self._sent.free()
            self._sent = None


def _mean_in_rank_order(rows: Sequence[torch.Tensor], target: torch.Tensor, add: bool, cut: Blocks) -> None:
    """target (+)= (rows[0] + rows[1] + ...) / W, in fp32 whatever the dtypes, rounded once; block by block."""
    scale, whole = 1.0 / len(rows), _sum_place(rows, target, add)
    places = cut(target)
    scratch = target.new_empty(places[0].numel() if places and whole is None else 0, dtype=torch.float32)
    means = cut(whole) if whole is not None else [scratch[: place.numel()] for place in places]
    for place, mean, *blocks in zip(places, means, *map(cut, rows), strict=True):
        if whole is None or len(blocks) == 1:
            mean.copy_(blocks[0])
        else:
            torch.add(blocks[0], blocks[1], out=mean)
        for block in blocks[1:] if whole is None else blocks[2:]:
            mean.add_(block)
        mean.mul_(scale)
        if whole is not target:
            place.add_(mean) if add else place.copy_(mean)


def _sum_place(rows: Sequence[torch.Tensor], target: torch.Tensor, add: bool) -> torch.Tensor | None:
    """Where an fp32 sum grows: where it belongs, else in the first row, which nobody reads again; None: beside.

    That may be where one of its first two rows lies, not a later one.
    """
    if rows[0].dtype != torch.float32:
        return None
    is_free = target.dtype == torch.float32 and not add and _place(target) not in map(_place, rows[2:])
    return target if is_free else rows[0]


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor begins. Not its address, which a dry run's tensors do not have."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def _sum_bytes(shard: torch.Tensor, block: int) -> int:
    """The fp32 block in which 16-bit parts are added up."""
    return min(shard.numel(), block) * torch.float32.itemsize


def block_numel(numel: int, kernels: str) -> int:
    """How many elements of a shard are added up at a time."""
    return _BLOCK_NUMEL if kernels == "cpu" else max(1 << 18, -(-numel // 16))
