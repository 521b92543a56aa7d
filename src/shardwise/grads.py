"""The gradients of a unit: where autograd leaves them, how they are reduced, what is held of them.

Names, used throughout:
- *strays*: gradients as autograd itself makes them, in `p.grad`.
- *full*: where gradients are replicated, the unit's flat gradients of this rank. Strays are moved there when the
  backward leaves the unit, and `p.grad` is then a view of it, to which later micro-batches add in place, until the
  reduction.
- *held*: where gradients are sharded, this rank's shard of the reduced gradients. Strays are then packed as they are
  sent, all at once or in pieces (see `budget`), and live for one micro-batch.
- *reduced*: the mean over the ranks of this rank's shard, wherever it is: `held`, or its slot in `full`.

Until the reduction, what `p.grad` says is the truth, also if the user changed or replaced it; after it, it is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Protocol

import torch
from torch import nn

from shardwise.budget import Flight, GradSizes
from shardwise.comm import DONE, Comm, Handle
from shardwise.layout import Layout, Span
from shardwise.marks import mark
from shardwise.memory import Buffer, Entry, Kind, Ledger, Tier
from shardwise.policy import Policy

_BLOCK_NUMEL = 1 << 15
"""Elements summed at a time on the CPU: 128 KiB of fp32, so that a block stays in the cache."""
_PADDING_NUMEL = 256
# Released parameters are watched (see `pending`), which costs a call into Python for each look at `grad`.
_PLAINLY = torch._C.DisableTorchFunctionSubclass


class Grads:
    """The gradients of one trainable unit."""

    def __init__(
        self,
        name: str,
        params: Sequence[nn.Parameter],
        layout: Layout,
        policy: Policy,
        comm: Comm,
        ledger: Ledger,
    ) -> None:
        self.name = name
        self.policy = policy
        self.is_reduced = False
        self.has_gradients = False
        self.flight = Flight()
        self._params = list(params)
        self._layout = layout
        self._comm = comm
        self._ledger = ledger
        self._shard = layout.shard(comm.rank)
        self._gathering: Handle | None = None
        self._exchange: Exchange | None = None
        self._strays = Entry(Kind.GRADS, f"{name} (local)", Tier.DEVICE)
        entry = Entry(Kind.GRADS, name, Tier.DEVICE)
        self._held = Buffer(ledger, entry, layout.shard_numel, policy.accumulate_dtype, comm.device)
        self._full: Buffer | None = None
        self._whole: Buffer | None = None
        self._views: list[torch.Tensor] = []
        if not policy.grads_sharded:
            self._full = Buffer(ledger, entry, layout.numel, policy.grad_dtype, comm.device)
            self._views = self._full.views(layout)
        for param in self._params:
            param.grad = None
            # Lets an fp32 view collect the gradients of a 16-bit parameter.
            param.grad_dtype = policy.grad_dtype

    @property
    def reduced(self) -> torch.Tensor:
        """This rank's shard of the reduced gradients."""
        assert self.is_reduced, f"the gradients of {self.name} are not reduced yet"
        return self._held.tensor if self._full is None else self._full.tensor[self._shard.slice]

    def sizes(self) -> GradSizes:
        """What the unit's gradients take, for the choice of their flight."""
        item = self.policy.grad_dtype.itemsize
        largest = max((slot.span.numel for slot in self._layout.slots), default=0)
        return GradSizes(self._layout.numel * item, largest * item, self._held.size_bytes)

    def open(self) -> None:
        """The backward reaches the unit: gradients are about to arrive."""
        self._begin()
        self._ledger.settle(self._strays, self._arriving_bytes())

    def _arriving_bytes(self) -> int:
        """What autograd makes: all gradients of the unit, or, to add to those that are there, one at a time."""
        sizes, weights, grads = self.sizes(), self.policy.weight_dtype, self.policy.grad_dtype
        if self._full is None or not self._full.live:
            return sizes.full
        cast = sizes.largest // grads.itemsize * weights.itemsize if weights != grads else 0
        return sizes.largest + cast

    def _begin(self) -> None:
        self.has_gradients = True
        if self.is_reduced and self._full is not None:
            raise RuntimeError(
                f"the gradients of {self.name} were already reduced in this step, and another backward would add to "
                "them: call backward once on the sum of the losses, or inside engine.no_sync() all but the last "
                'time, or set gradients.reduce_at to "step"'
            )

    def collect(self) -> None:
        """Move the strays of this micro-batch into `full`, where gradients are replicated."""
        if self._full is None:
            return
        if not self._full.live:
            self._full.allocate()
        views, params = self._views, self._params
        if not any(param.grad is view for param, view in zip(params, views, strict=True)):
            _pack(self._full.tensor, Span(0, self._layout.numel), params, self._layout)
        else:
            for param, view in zip(params, views, strict=True):
                if param.grad is None:
                    view.zero_()
                elif param.grad is not view:
                    view.copy_(param.grad.detach())
        for param, view in zip(params, views, strict=True):
            param.grad = view
        self._ledger.settle(self._strays, 0)

    def start_reduce(self) -> None:
        """Send every rank its part. `finish_reduce` waits for ours and adds it up."""
        with mark("reduce", self.name):
            self._begin()
            self.collect()
            source: Source = Strays(self._params, self._layout, self._let_go)
            if self._full is not None:
                source = Flat(self._full.tensor.view(self._layout.world_size, -1))
            self._exchange = Exchange(source, self._layout, self.policy.reduce_dtype, self.flight.pieces, self._ledger)
            self._exchange.start(self._comm)
            if self._full is not None:
                self._let_go()

    def finish_reduce(self) -> None:
        """Hold the mean over the ranks of this rank's shard, added to that of earlier micro-batches."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        with mark("reduce", self.name):
            exchange.finish(self._comm, self._target)
            self.is_reduced = True

    def late_gradient(self) -> bool:
        """Whether a gradient arrived after the unit was reduced, and so is in nobody's sum."""
        with _PLAINLY():
            return self.is_reduced and any(param.grad is not None for param in self._params)

    def start_gather(self) -> None:
        """Where the optimizer is replicated: bring the reduced gradients of all ranks to every rank."""
        if self.policy.optim_sharded or self._comm.world_size == 1 or self._gathering is not None:
            return
        if self._full is None:
            self._whole = self._whole_buffer()
        self._gathering = self._comm.gather(self._everything, "reduce")

    def owned(self) -> torch.Tensor:
        """The reduced gradients of the elements whose optimizer state this rank holds."""
        if self.policy.optim_sharded or self._comm.world_size == 1:
            return self.reduced
        self.start_gather()
        assert self._gathering is not None
        self._gathering.wait()
        return self._everything

    def full_copy(self) -> torch.Tensor:
        """The whole unit's reduced gradients, in a fresh tensor. A collective."""
        full = self.reduced.new_empty(self._layout.numel)
        full[self._shard.slice] = self.reduced
        self._comm.gather(full, "control").wait()
        return full

    def clear(self) -> None:
        """Forget the gradients of this step and free their buffers."""
        self.abandon()
        self.is_reduced = self.has_gradients = False
        self._held.free()
        if self._whole is not None:
            self._whole.free()
            self._whole = None
        self._let_go()
        if self._full is not None:
            self._full.free()

    def abandon(self) -> None:
        """Wait out what is in flight and drop it."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        if self._exchange is not None:
            self._exchange.abandon()
            self._exchange = None

    def _let_go(self) -> None:
        with _PLAINLY():
            for param in self._params:
                param.grad = None
        self._ledger.settle(self._strays, 0)

    @property
    def _everything(self) -> torch.Tensor:
        buffer = self._full or self._whole
        assert buffer is not None
        return buffer.tensor

    def _whole_buffer(self) -> Buffer:
        entry = Entry(Kind.WORK, self.name, Tier.DEVICE)
        whole = Buffer(self._ledger, entry, self._layout.numel, self.policy.accumulate_dtype, self._comm.device)
        whole.allocate()[self._shard.slice] = self.reduced
        return whole

    def _target(self) -> tuple[torch.Tensor, bool]:
        """Where the mean goes, and whether it is added to what is there."""
        if self._full is not None:
            return self._full.tensor[self._shard.slice], False
        if self._held.live:
            return self._held.tensor, True
        return self._held.allocate(), False


class Source(Protocol):
    """Gradients to send, seen as [W, shard]."""

    @property
    def whole(self) -> torch.Tensor | None:
        """All of them in one tensor, if they are in one."""

    def pack(self, sent: torch.Tensor, start: int, stop: int) -> None:
        """Copy the columns from `start` to `stop` of every shard."""

    def free(self) -> None:
        """All is packed: let go of what is not needed any more."""


class Flat:
    """Gradients in the unit's flat buffer."""

    def __init__(self, shards: torch.Tensor) -> None:
        self.whole = shards

    def pack(self, sent: torch.Tensor, start: int, stop: int) -> None:
        sent.copy_(self.whole[:, start:stop])

    def free(self) -> None:
        pass


class Strays:
    """Gradients as autograd keeps them, each in its parameter's `grad`."""

    whole = None

    def __init__(self, params: Sequence[nn.Parameter], layout: Layout, free: Callable[[], None]) -> None:
        self._params = params
        self._layout = layout
        self.free = free

    def pack(self, sent: torch.Tensor, start: int, stop: int) -> None:
        if stop - start == self._layout.shard_numel:
            _pack(sent.view(-1), Span(0, self._layout.numel), self._params, self._layout)
            return
        for rank, row in enumerate(sent):
            _pack(row, Span(start, stop).shift(rank * self._layout.shard_numel), self._params, self._layout)


def _pack(target: torch.Tensor, wanted: Span, params: Sequence[nn.Parameter], layout: Layout) -> None:
    """Lay the gradients of `params` that fall into `wanted` of the flat buffer side by side, zeros in between."""
    row: list[torch.Tensor] = []
    position = wanted.start
    with _PLAINLY():
        for slot, param in zip(layout.slots, params, strict=True):
            span, grad = slot.span, param.grad
            start, stop = max(span.start, wanted.start), min(span.stop, wanted.stop)
            if start < stop and grad is not None:
                if start > position:
                    row.append(_zeros(start - position, target.dtype, target.device))
                flat = grad.detach().reshape(-1)
                row.append(flat if stop - start == span.numel else flat[start - span.start : stop - span.start])
                position = stop
    if wanted.stop > position:
        row.append(_zeros(wanted.stop - position, target.dtype, target.device))
    if row:
        torch.cat(row, out=target)


def _zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Contiguous zeros, which let cat take its fast path; those for padding are made once."""
    make = _padding if numel <= _PADDING_NUMEL else _padding.__wrapped__
    return make(numel, dtype, device)


@cache
def _padding(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype, device=device)


class Exchange:
    """One reduction in flight: parts out to their owners, parts in from every rank, added up in rank order.

    Gradients that lie in one flat buffer are sent from there; others are packed first, all at once or in pieces.
    """

    def __init__(self, source: Source, layout: Layout, dtype: torch.dtype, pieces: int, ledger: Ledger) -> None:
        self._source = source
        self._world_size = layout.world_size
        self._dtype = dtype
        self._ledger = ledger
        self._handle: Handle = DONE
        self._sent: Buffer | None = None
        self._received: Buffer | None = None
        self._parts: torch.Tensor
        step = max(1, -(-layout.shard_numel // pieces))
        self._cuts = [(start, min(start + step, layout.shard_numel)) for start in range(0, layout.shard_numel, step)]

    def start(self, comm: Comm) -> None:
        """Issue the first piece."""
        if self._cuts:
            self._issue(comm, *self._cuts[0])

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
            if self._received is not None:
                self._drop_sent()
            tensor, adds = place = place or target()
            with self._ledger.passing("exchange", Tier.DEVICE, _mean_bytes(self._parts)):
                _mean_in_rank_order(self._parts, tensor[start:stop], adds)
            self.abandon()
        if place is None:
            target()

    def abandon(self) -> None:
        """Wait, and free the buffers."""
        self._handle.wait()
        self._handle = DONE
        self._drop_sent()
        if self._received is not None:
            self._received.free()
            self._received = None

    def _issue(self, comm: Comm, start: int, stop: int) -> None:
        whole, shape = self._source.whole, (self._world_size, stop - start)
        if len(self._cuts) == 1 and whole is not None and whole.dtype == self._dtype:
            self._parts = whole
        else:
            self._sent = self._buffer(comm, shape)
            self._parts = self._sent.allocate().view(shape)
            self._source.pack(self._parts, start, stop)
        if stop == self._cuts[-1][1]:
            self._source.free()
        if self._world_size > 1:
            self._received = self._buffer(comm, shape)
            sent, self._parts = self._parts, self._received.allocate().view(shape)
            self._handle = comm.exchange(self._parts.view(-1), sent.view(-1), "reduce")

    def _buffer(self, comm: Comm, shape: tuple[int, int]) -> Buffer:
        entry = Entry(Kind.WORK, "exchange", Tier.DEVICE)
        return Buffer(self._ledger, entry, shape[0] * shape[1], self._dtype, comm.device)

    def _drop_sent(self) -> None:
        if self._sent is not None:
            self._sent.free()
            self._sent = None


def _mean_in_rank_order(parts: torch.Tensor, target: torch.Tensor, add: bool) -> None:
    """target (+)= (parts[0] + parts[1] + ...) / W, in fp32 whatever the dtypes, rounded once.

    Adding 0.0 at the end turns -0.0 into 0.0, so that it does not matter whether autograd copied a gradient or added
    it to zeros.
    """
    scale = 1.0 / parts.shape[0]
    for start, stop in _blocks(target) if len(parts) > 1 else [(0, target.numel())]:
        mean = parts[0, start:stop]
        if len(parts) > 1:
            mean = mean.to(torch.float32, copy=True)
            for part in parts[1:, start:stop]:
                mean.add_(part)
            mean.mul_(scale)
        if add:
            target[start:stop].add_(mean)
        else:
            torch.add(mean, 0.0, out=target[start:stop])


def _mean_bytes(parts: torch.Tensor) -> int:
    """The fp32 block in which the mean is made."""
    return min(parts.shape[1], _block_numel(parts[0])) * torch.float32.itemsize if len(parts) > 1 else 0


def _block_numel(target: torch.Tensor) -> int:
    return _BLOCK_NUMEL if target.device.type == "cpu" else max(1 << 18, -(-target.numel() // 16))


def _blocks(target: torch.Tensor) -> Iterator[tuple[int, int]]:
    numel, block = target.numel(), _block_numel(target)
    for start in range(0, numel, block):
        yield start, min(start + block, numel)
