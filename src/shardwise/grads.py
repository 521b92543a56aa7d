"""The gradients of a unit: where autograd adds them, how they are reduced, what is held of them.

Names, used throughout:
- *full*: the unit's flat gradients of this rank. `p.grad` of every parameter is a view of it, so autograd adds in
  place. Replicated gradients rest there; sharded ones use it for one micro-batch.
- *strays*: gradients that autograd keeps by itself in `p.grad`: all of them where gradients travel piecewise
  (see `budget`), which then needs no `full`.
- *held*: this rank's shard of the reduced gradients, where they are sharded.
- *reduced*: the mean over the ranks of this rank's shard, wherever it is: `held`, or its slot in `full`.

What `p.grad` says is the truth: a gradient that arrived before `full` was there, or that the user replaced, is taken
into `full` before the reduction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import nn
from torch.profiler import record_function

from shardwise.budget import Flight, GradSizes
from shardwise.comm import DONE, Comm, Handle
from shardwise.layout import Layout, Span
from shardwise.memory import Buffer, Entry, Kind, Ledger, Tier
from shardwise.policy import Policy

_BLOCK_NUMEL = 1 << 15
"""Elements summed at a time on the CPU: 128 KiB of fp32, so that a block stays in the cache."""


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
        entry = Entry(Kind.GRADS, name, Tier.DEVICE)
        self._full = Buffer(ledger, entry, layout.numel, policy.grad_dtype, comm.device)
        self._held = Buffer(ledger, entry, layout.shard_numel, policy.accumulate_dtype, comm.device)
        self._whole: Buffer | None = None
        self._views = self._full.views(layout)
        for param in self._params:
            # Lets an fp32 view collect the gradients of a 16-bit parameter.
            param.grad_dtype = policy.grad_dtype

    @property
    def reduced(self) -> torch.Tensor:
        """This rank's shard of the reduced gradients."""
        assert self.is_reduced, f"the gradients of {self.name} are not reduced yet"
        return self._held.tensor if self._held.live else self._full.tensor[self._shard.slice]

    def sizes(self) -> GradSizes:
        """What the unit's gradients take, for the choice of their flight."""
        item = self.policy.grad_dtype.itemsize
        largest = max((slot.span.numel for slot in self._layout.slots), default=0)
        return GradSizes(self._layout.numel * item, largest * item, self._held.size_bytes)

    def open(self) -> None:
        """Make room for this micro-batch's gradients, before autograd produces the first."""
        if self.is_reduced and not self.policy.grads_sharded:
            raise RuntimeError(
                f"the gradients of {self.name} were already reduced in this step, and another backward would add to "
                "them: call backward once on the sum of the losses, or inside engine.no_sync() all but the last "
                'time, or set gradients.reduce_at to "step"'
            )
        self.has_gradients = True
        if self._keeps_strays:
            return
        if not self._full.live:
            self._full.allocate().zero_()
        self._absorb()

    def start_reduce(self) -> None:
        """Send every rank its part. `finish_reduce` waits for ours and adds it up."""
        with record_function(f"shardwise::reduce {self.name}"):
            self.open()
            shape = (self._comm.world_size, self._layout.shard_numel)
            if self._keeps_strays:
                source: Source = Strays(self._params, self._layout)
            else:
                source = Flat(self._full.tensor.view(shape))
            self._exchange = Exchange(
                source, shape, self.policy.reduce_dtype, self.flight.pieces, self._comm, self._ledger
            )
            self._exchange.start()
            if self.policy.grads_sharded and not self._keeps_strays:
                self._unbind()

    def finish_reduce(self) -> None:
        """Hold the mean over the ranks of this rank's shard, added to that of earlier micro-batches."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        with record_function(f"shardwise::reduce {self.name}"):
            first = not self._held.live
            # A first sum goes through our slot of `full`, so that `held` is allocated only after the receive buffer
            # is gone: test_memory's one-unit models would be upside down otherwise.
            via_slot = self._full.live and first and self._full.tensor.dtype == self._held.tensor.dtype
            if self.policy.grads_sharded and first and not via_slot:
                self._held.allocate()
            exchange.finish(
                self._held.tensor if self._held.live else self._full.tensor[self._shard.slice], add=not first
            )
            if self.policy.grads_sharded:
                if via_slot:
                    self._held.allocate().copy_(self._full.tensor[self._shard.slice])
                self._unbind()
                self._full.free()
            self.is_reduced = True

    def start_gather(self) -> None:
        """Where the optimizer is replicated: bring the reduced gradients of all ranks to every rank."""
        if self.policy.optim_sharded or self._comm.world_size == 1 or self._gathering is not None:
            return
        if self._held.live:
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
        full = self.reduced.new_empty(self._full.tensor.numel())
        full[self._shard.slice] = self.reduced
        self._comm.gather(full, "control").wait()
        return full

    def clear(self) -> None:
        """Forget the gradients of this step. Replicated buffers stay, zeroed: autograd adds into them."""
        self.abandon()
        self.is_reduced = self.has_gradients = False
        self._held.free()
        if self._whole is not None:
            self._whole.free()
            self._whole = None
        if self.policy.grads_sharded:
            self._unbind()
            self._full.free()
        elif self._full.live:
            self._full.tensor.zero_()

    def abandon(self) -> None:
        """Wait out what is in flight and drop it."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        if self._exchange is not None:
            self._exchange.abandon()
            self._exchange = None

    def free(self) -> None:
        """Drop every buffer."""
        self.clear()
        self._unbind()
        self._full.free()

    @property
    def _keeps_strays(self) -> bool:
        return self.policy.grads_sharded and not self.flight.is_whole

    @property
    def _everything(self) -> torch.Tensor:
        return self._full.tensor if self._whole is None else self._whole.tensor

    def _whole_buffer(self) -> Buffer:
        entry = Entry(Kind.WORK, self.name, Tier.DEVICE)
        whole = Buffer(self._ledger, entry, self._full.tensor.numel(), self.policy.accumulate_dtype, self._comm.device)
        whole.allocate()[self._shard.slice] = self.reduced
        return whole

    def _absorb(self) -> None:
        for param, view in zip(self._params, self._views, strict=True):
            grad = param.grad
            if grad is view:
                continue
            if grad is not None:
                view.copy_(grad.detach())
            elif not self.policy.grads_sharded:
                view.zero_()
            param.grad = view

    def _unbind(self) -> None:
        for param in self._params:
            param.grad = None


class Source(Protocol):
    """Gradients to send, seen as [W, shard]."""

    @property
    def whole(self) -> torch.Tensor | None:
        """All of them in one tensor, if they are in one."""

    def pack(self, sent: torch.Tensor, start: int, stop: int) -> None:
        """Copy the columns from `start` to `stop` of every shard."""


class Flat:
    """Gradients in the unit's flat buffer."""

    def __init__(self, shards: torch.Tensor) -> None:
        self.whole = shards

    def pack(self, sent: torch.Tensor, start: int, stop: int) -> None:
        sent.copy_(self.whole[:, start:stop])


class Strays:
    """Gradients as autograd keeps them, each in its parameter's `grad`."""

    whole = None

    def __init__(self, params: Sequence[nn.Parameter], layout: Layout) -> None:
        self._params = params
        self._layout = layout

    def pack(self, sent: torch.Tensor, start: int, stop: int) -> None:
        sent.zero_()
        for rank, row in enumerate(sent):
            wanted = Span(start, stop).shift(rank * self._layout.shard_numel)
            for slot, param in zip(self._layout.slots, self._params, strict=True):
                part = slot.span.intersect(wanted)
                if part and param.grad is not None:
                    grad = param.grad.detach().reshape(-1)
                    row[part.shift(-wanted.start).slice] = grad[part.shift(-slot.span.start).slice]


class Exchange:
    """One reduction in flight: parts out to their owners, parts in from every rank, added up in rank order.

    In one piece, the gradients are sent from where they are. In several, each piece of every shard is packed first:
    two buffers of 1/pieces of the unit instead of one of the whole.
    """

    def __init__(
        self, source: Source, shape: tuple[int, int], dtype: torch.dtype, pieces: int, comm: Comm, ledger: Ledger
    ) -> None:
        self._source = source
        self._dtype = dtype
        self._comm = comm
        self._ledger = ledger
        self._buffers: list[Buffer] = []
        self._handle: Handle = DONE
        self._received: torch.Tensor
        self._world_size, shard_numel = shape
        step = max(1, -(-shard_numel // pieces))
        self._cuts = [(start, min(start + step, shard_numel)) for start in range(0, shard_numel, step)]

    def start(self) -> None:
        """Issue the first piece."""
        if self._cuts:
            self._issue(*self._cuts[0])

    def finish(self, target: torch.Tensor, add: bool) -> None:
        """Wait for each piece, write its mean into `target` (or add it), and issue the next."""
        for index, (start, stop) in enumerate(self._cuts):
            if index:
                self._issue(start, stop)
            self._handle.wait()
            _mean_in_rank_order(self._received, target[start:stop], add)
            self._free()

    def abandon(self) -> None:
        self._handle.wait()
        self._free()

    def _issue(self, start: int, stop: int) -> None:
        whole = self._source.whole
        if len(self._cuts) == 1 and whole is not None and whole.dtype == self._dtype:
            sent = whole
        else:
            sent = self._allocate(stop - start)
            self._source.pack(sent, start, stop)
        self._received = sent
        if self._world_size > 1:
            self._received = self._allocate(stop - start)
            self._handle = self._comm.exchange(self._received.view(-1), sent.view(-1), "reduce")

    def _allocate(self, columns: int) -> torch.Tensor:
        entry = Entry(Kind.WORK, "exchange", Tier.DEVICE)
        buffer = Buffer(self._ledger, entry, self._world_size * columns, self._dtype, self._comm.device)
        self._buffers.append(buffer)
        return buffer.allocate().view(self._world_size, columns)

    def _free(self) -> None:
        for buffer in self._buffers:
            buffer.free()
        self._buffers.clear()


def _mean_in_rank_order(parts: torch.Tensor, target: torch.Tensor, add: bool) -> None:
    """target (+)= (parts[0] + parts[1] + ...) / W, in fp32 whatever the dtypes, rounded once.

    Adding 0.0 at the end turns -0.0 into 0.0, so that it does not matter whether autograd copied a gradient or added
    it to zeros.
    """
    scale = 1.0 / parts.shape[0]
    for start, stop in _blocks(target):
        mean = parts[0, start:stop].to(torch.float32, copy=True)
        for part in parts[1:, start:stop]:
            mean.add_(part)
        mean.mul_(scale)
        if add:
            target[start:stop].add_(mean)
        else:
            torch.add(mean, 0.0, out=target[start:stop])


def _blocks(target: torch.Tensor) -> Iterator[tuple[int, int]]:
    numel = target.numel()
    block = _BLOCK_NUMEL if target.device.type == "cpu" else max(1, -(-numel // 8))
    for start in range(0, numel, block):
        yield start, min(start + block, numel)
