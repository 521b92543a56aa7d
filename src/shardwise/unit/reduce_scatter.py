"""A reduce-scatter of a unit's gradients: from where autograd leaves them to the mean of this rank's shard.

Each rank sends its parts to their owners, and adds up what it receives in rank order. Over several nodes it does so
twice: in its node, where it gets the parts of all ranks with its local index, and with the node's mean of these, among
those ranks. Each hop makes a mean, so that no sum of 16-bit gradients overflows between hops.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from shardwise.comm import DONE, Comm, Handle, Hop
from shardwise.memory import Buffer, Entry, Kind, Ledger, Tier
from shardwise.memory.reduce_plan import sum_block_numel
from shardwise.unit.grad_source import GradSource
from shardwise.unit.plan import UnitPlan
from shardwise.unit.reduced_shard import ReducedShard

Blocks = Callable[[torch.Tensor], Sequence[torch.Tensor]]
"""Cuts a tensor into blocks that are worked on one after the other."""


class ReduceScatter:
    """One unit's gradients, sent at once or in several parts over each of `hops`, and their mean, added to a shard."""

    def __init__(
        self,
        plan: UnitPlan,
        source: GradSource,
        shard: ReducedShard,
        comm: Comm,
        ledger: Ledger,
        hops: Sequence[Hop],
    ) -> None:
        self._name = plan.name
        self._source = source
        self._shard = shard
        self._dtype = source.wire_dtype
        self._comm = comm
        self._ledger = ledger
        self._hops = hops
        self._next_hop = 0
        self._handle: Handle = DONE
        self._sent: Buffer | None = None
        self._received: list[Buffer] = []
        self._rows: Sequence[torch.Tensor] = ()
        self._row_count = math.prod([hop.size for hop in hops])
        numel = source.numel // self._row_count
        step = max(1, -(-numel // plan.reduce_plan.parts))
        self._cuts = [(start, min(start + step, numel)) for start in range(0, numel, step)]

    def start(self) -> None:
        """Issue the first part."""
        if self._cuts:
            self._issue(*self._cuts[0])
        else:
            self._source.packed()

    def finish(self) -> None:
        """Wait for each part, add its mean to the shard, and issue the next.

        The shard's memory is asked for once the first part has arrived and its send buffer is freed, so that a new
        shard takes that buffer's place: otherwise a higher stage would need more memory than a lower one on models of
        one unit (test_peak_is_bounded_and_never_upside_down).
        """
        place: tuple[torch.Tensor, bool] | None = None
        for index, (start, stop) in enumerate(self._cuts):
            if index:
                self._issue(start, stop)
            self._pass_hops(start)
            self._handle.wait()
            if self._received and not self._reads_sent:
                self._drop_sent()
            tensor, adds = place = place or self._shard.target()
            self._add_up(tensor[start:stop], adds)
            self.abandon()
        if place is None:
            self._shard.target()
        self._shard.store()

    def abandon(self) -> None:
        """Wait for what is in flight, and free the buffers."""
        self._handle.wait()
        self._handle = DONE
        self._rows = ()
        self._drop_sent()
        while self._received:
            self._received.pop().free()

    @property
    def _reads_sent(self) -> bool:
        """Whether a row that is added up is in the buffer that was sent."""
        return any(self._comm.rows_received(hop) == hop.size - 1 for hop in self._hops)

    def _issue(self, start: int, stop: int) -> None:
        parts = self._pack(start, stop)
        self._rows, self._next_hop = list(parts), 0
        if stop == self._cuts[-1][1]:
            self._source.packed()
        if self._hops:
            self._pass_hop(parts, start)
        if self._comm.runs_ahead:
            self._pass_hops(start)

    def _pass_hops(self, start: int) -> None:
        """Go on to the last hop, from the mean of the one before each."""
        while 0 < self._next_hop < len(self._hops):
            self._pass_hop(None, start)

    def _pass_hop(self, parts: torch.Tensor | None, start: int) -> None:
        """Issue the next hop with `parts`, or with the mean of the rows that arrive, for which the first has room."""
        hop, self._next_hop = self._hops[self._next_hop], self._next_hop + 1
        sent = self._rows[0] if parts is None else parts
        shape = (self._comm.rows_received(hop), sent.numel() // hop.size)
        self._received.append(self._buffer(shape))
        received = self._received[-1].allocate().view(shape)
        with contextlib.nullcontext() if parts is not None else self._comm.following(self._handle):
            if parts is None:
                self._add_up(sent, False)
            # Each part has a name of its own: the sequence of operations is the same in every step (`agreement`).
            name = self._name if len(self._cuts) == 1 else f"{self._name} from {start}"
            rows = sent.view(hop.size, -1)
            self._handle, self._rows = self._comm.exchange(received, rows, "reduce", name, hop)

    def _pack(self, start: int, stop: int) -> torch.Tensor:
        whole = self._source.whole() if len(self._cuts) == 1 else None
        if whole is not None:
            return whole.view(self._row_count, -1)
        shape = (self._row_count, stop - start)
        self._sent = self._buffer(shape)
        parts = self._sent.allocate().view(shape)
        self._source.pack(parts, start, stop)
        return parts

    def _add_up(self, part: torch.Tensor, adds: bool) -> None:
        block = sum_block_numel(part.numel(), self._comm.kernels)
        block_bytes = min(part.numel(), block) * torch.float32.itemsize if self._dtype != torch.float32 else 0
        with self._ledger.passing("exchange", Tier.DEVICE, block_bytes):
            _mean_in_rank_order(self._rows, part, adds, partial(self._comm.blocks, block_numel=block))

    def _buffer(self, shape: tuple[int, int]) -> Buffer:
        entry = Entry(Kind.WORK, "exchange", Tier.DEVICE)
        return Buffer(self._ledger, entry, shape[0] * shape[1], self._dtype, self._comm.device)

    def _drop_sent(self) -> None:
        self._source.sent()
        if self._sent is not None:
            self._sent.free()
            self._sent = None


def _mean_in_rank_order(rows: Sequence[torch.Tensor], target: torch.Tensor, add: bool, cut: Blocks) -> None:
    """target (+)= (rows[0] + rows[1] + ...) / W, in fp32 whatever the dtypes, rounded once; block by block.

    The order of the ranks is fixed, so the bits depend on the values alone (test_bits).
    """
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
    """Where an fp32 sum is made: in the target, else in the first row, which is not read again; None: beside them.

    The target may be where one of the first two rows lies, not a later one, which would be overwritten before it is
    added.
    """
    if rows[0].dtype != torch.float32:
        return None
    is_free = target.dtype == torch.float32 and not add and _place(target) not in map(_place, rows[2:])
    return target if is_free else rows[0]


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor begins. Not its address: the tensors of a dry run have none."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())
