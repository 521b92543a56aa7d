"""A reduce-scatter of a unit's gradients: from where autograd leaves them to the mean of this rank's shard.

What is sent is a `GradSource`: the gradients as autograd leaves them in `p.grad`, or in one flat buffer. Each rank
sends its parts to their owners, and adds up what it receives in rank order. Over several nodes it does so twice: in its
node, where it gets the parts of all ranks with its local index, and with the node's mean of these, among those ranks.
Each hop makes a mean, so that no sum of 16-bit gradients overflows between hops.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from shardwise.comm import DONE, Comm, Handle, Hop
from shardwise.memory import Buffer, Entry, Kind, Ledger, Tier
from shardwise.memory.reduce_plan import sum_block_numel
from shardwise.partition import Layout, Span
from shardwise.partition.dtensors import is_dtensor, local_grads
from shardwise.unit.params import PLAINLY
from shardwise.unit.plan import UnitPlan
from shardwise.unit.reduced_shard import ReducedShard

_EXCHANGE = Entry(Kind.WORK, "exchange", Tier.DEVICE)


class GradSource(Protocol):
    """Gradients to send: `numel` of them in one flat order, in `wire_dtype`."""

    numel: int
    wire_dtype: torch.dtype

    def whole(self) -> torch.Tensor | None:
        """All of them in one tensor, if that needs no other buffer than their own."""

    def pack(self, sent: torch.Tensor, cut: Span) -> None:
        """Divide them into as many parts as `sent` has rows, and copy the elements `cut` of each."""

    def packed(self) -> None:
        """Everything is in buffers: drop what is not needed any more."""

    def sent(self) -> None:
        """Everything is sent: free what `whole` returned."""


class Packing:
    """A buffer laid out as the unit is, into which the gradients of its parameters are copied in one operation."""

    def __init__(self, buffer: Buffer, layout: Layout) -> None:
        self.buffer = buffer
        self.views = buffer.views(layout)

    def fill(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Copy every gradient into place; zeros where there is none, and in between."""
        places, blanks = self.views, self.buffer.gaps
        present = [grad for grad in grads if grad is not None]
        if len(present) < len(grads):
            blanks = blanks + [view for view, grad in zip(places, grads, strict=True) if grad is None]
            places = [view for view, grad in zip(places, grads, strict=True) if grad is not None]
        if present:
            torch._foreach_copy_(places, present)
        if blanks:
            torch._foreach_zero_(blanks)

    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add every gradient in place."""
        pairs = [(view, grad) for view, grad in zip(self.views, grads, strict=True) if grad is not None]
        if pairs:
            torch._foreach_add_([view for view, _ in pairs], [grad for _, grad in pairs])


class AutogradGrads:
    """The gradients of a unit as autograd leaves them, each in its parameter's `grad`."""

    def __init__(self, name: str, params: Sequence[torch.Tensor], packing: Packing, layout: Layout, ledger: Ledger):
        self.params = list(params)
        self.numel = layout.numel
        self.wire_dtype = packing.buffer.tensor.dtype
        self._packing = packing
        self._layout = layout
        self._ledger = ledger
        self._entry = Entry(Kind.GRADS, f"{name} (local)", Tier.DEVICE)
        self._has_dtensors = any(map(is_dtensor, params))

    def expect(self, size_bytes: int) -> None:
        """Enter into the ledger what autograd is about to make."""
        self._ledger.set_bytes(self._entry, size_bytes)

    def as_left(self) -> list[torch.Tensor | None]:
        """The gradients as autograd has left them."""
        with PLAINLY():
            return [param.grad for param in self.params]

    def read(self) -> list[torch.Tensor | None]:
        """The gradients as plain values: a backward with `create_graph` leaves some that have a history."""
        grads = self.as_left()
        if self._has_dtensors:
            with PLAINLY():
                grads = local_grads(self.params, grads)
        if not torch.is_grad_enabled():
            return grads
        return [grad if grad is None else grad.detach() for grad in grads]

    def exist(self) -> bool:
        """Whether a parameter has a gradient."""
        return bool([grad for grad in self.as_left() if grad is not None])

    def replace(self, views: Sequence[torch.Tensor]) -> None:
        """Make each `grad` a view, to which autograd adds in place."""
        with PLAINLY():
            for param, view in zip(self.params, views, strict=True):
                param.grad = view
        self.expect(0)

    def take_hooked(self) -> set[int]:
        """Take `grad` off the parameters whose hooks may add it up over the tp axis, as transformers' do: such a hook
        has to see the gradient of one micro-batch, and would add those before it up again. Their places."""
        if not self._has_dtensors:
            return set()
        hooked = {index for index, param in enumerate(self.params) if _is_hooked(param)}
        with PLAINLY():
            for index in hooked:
                self.params[index].grad = None
        return hooked

    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add gradients that arrived elsewhere."""
        with PLAINLY(), torch.no_grad():
            for param, grad in zip(self.params, grads, strict=True):
                if grad is not None:
                    param.grad = grad if param.grad is None else param.grad.add_(grad)

    def add_to(self, views: Sequence[torch.Tensor]) -> None:
        """The same, with what has arrived added to the views."""
        arrived = self.as_left()
        self.replace(views)
        self.add(arrived)

    def drop(self) -> None:
        """Take the gradients off the parameters."""
        with PLAINLY():
            for param in self.params:
                param.grad = None
        self.expect(0)

    # As a `GradSource`

    def whole(self) -> torch.Tensor | None:
        flat = self._packing.buffer.allocate()
        self._packing.fill(self.read())
        return flat

    def pack(self, sent: torch.Tensor, cut: Span) -> None:
        grads, part_numel = self.read(), self.numel // len(sent)
        for index, row in enumerate(sent):
            _lay_out(row, cut.shift(index * part_numel), grads, self._layout)

    def packed(self) -> None:
        self.drop()

    def sent(self) -> None:
        self._packing.buffer.free()


class FlatGrads:
    """Gradients in a flat buffer, which may be overwritten: a `GradSource`."""

    def __init__(self, flat: torch.Tensor, wire_dtype: torch.dtype) -> None:
        self.numel = flat.numel()
        self.wire_dtype = wire_dtype
        self._flat = flat

    def whole(self) -> torch.Tensor | None:
        return self._flat if self._flat.dtype == self.wire_dtype else None

    def pack(self, sent: torch.Tensor, cut: Span) -> None:
        sent.copy_(self._flat.view(len(sent), -1)[:, cut.slice])

    def packed(self) -> None:
        pass

    def sent(self) -> None:
        pass


def _is_hooked(param: torch.Tensor) -> bool:
    """Whether a hook that is not ours runs after a gradient was accumulated."""
    hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    plain = (getattr(hook, "func", hook) for hook in hooks.values())
    return any(not getattr(hook, "__module__", "").startswith("shardwise.") for hook in plain)


def _lay_out(target: torch.Tensor, wanted: Span, grads: Sequence[torch.Tensor | None], layout: Layout) -> None:
    """Copy the gradients that fall into `wanted` of the flat buffer to `target`, with zeros in between."""
    target.zero_()
    for slot, grad in zip(layout.slots, grads, strict=True):
        part = slot.span.intersect(wanted)
        if part and grad is not None:
            flat = grad.reshape(-1)
            target[part.shift(-wanted.start).slice] = flat[part.shift(-slot.span.start).slice]


Blocks = Callable[[torch.Tensor], Sequence[torch.Tensor]]
"""Cuts a tensor into blocks that are worked on one after the other."""


class ReduceScatter:
    """One unit's gradients, sent at once or in several parts over each of `hops`, and their mean, added to a shard.

    It is used for one reduction after the other. Its buffers have no memory in between.
    """

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
        self._buffers: dict[tuple[int, tuple[int, int]], Buffer] = {}
        self._reads_sent = any(comm.rows_received(hop) == hop.size - 1 for hop in hops)
        """Whether a row that is added up is in the buffer that was sent."""
        self._rows: Sequence[torch.Tensor] = ()
        self._row_count = math.prod([hop.size for hop in hops])
        numel = source.numel // self._row_count
        step = max(1, -(-numel // plan.reduce_plan.parts))
        self._cuts = list(Span(0, numel).split(step))

    def start(self) -> None:
        """Issue the first part."""
        if self._cuts:
            self._issue(self._cuts[0])
        else:
            self._source.packed()

    def finish(self) -> None:
        """Wait for each part, add its mean to the shard, and issue the next.

        The shard's memory is asked for once the first part has arrived and its send buffer is freed, so that a new
        shard takes that buffer's place: otherwise a higher stage would need more memory than a lower one on models of
        one unit (test_peak_is_bounded_and_never_upside_down).
        """
        place: tuple[torch.Tensor, bool] | None = None
        for index, cut in enumerate(self._cuts):
            if index:
                self._issue(cut)
            self._pass_hops(cut)
            self._handle.wait()
            if self._received and not self._reads_sent:
                self._drop_sent()
            tensor, adds = place = place or self._shard.target()
            self._add_up(tensor[cut.slice], adds)
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

    def _issue(self, cut: Span) -> None:
        parts = self._pack(cut)
        self._rows, self._next_hop = list(parts), 0
        if cut is self._cuts[-1]:
            self._source.packed()
        if self._hops:
            self._pass_hop(parts, cut)
        if self._comm.runs_ahead:
            self._pass_hops(cut)

    def _pass_hops(self, cut: Span) -> None:
        """Go on to the last hop, from the mean of the one before each."""
        while 0 < self._next_hop < len(self._hops):
            self._pass_hop(None, cut)

    def _pass_hop(self, parts: torch.Tensor | None, cut: Span) -> None:
        """Issue the next hop with `parts`, or with the mean of the rows that arrive, for which the first has room."""
        hop, self._next_hop = self._hops[self._next_hop], self._next_hop + 1
        sent = self._rows[0] if parts is None else parts
        shape = (self._comm.rows_received(hop), sent.numel() // hop.size)
        self._received.append(self._buffer(self._next_hop, shape))
        received = self._received[-1].allocate().view(shape)
        with contextlib.nullcontext() if parts is not None else self._comm.following(self._handle):
            if parts is None:
                self._add_up(sent, False)
            # Each part has a name of its own: the sequence of operations is the same in every step (`agreement`).
            name = self._name if len(self._cuts) == 1 else f"{self._name} from {cut.start}"
            rows = sent.view(hop.size, -1)
            self._handle, self._rows = self._comm.exchange(received, rows, "reduce", name, hop)

    def _pack(self, cut: Span) -> torch.Tensor:
        whole = self._source.whole() if len(self._cuts) == 1 else None
        if whole is not None:
            return whole.view(self._row_count, -1)
        shape = (self._row_count, cut.numel)
        self._sent = self._buffer(0, shape)
        parts = self._sent.allocate().view(shape)
        self._source.pack(parts, cut)
        return parts

    def _add_up(self, part: torch.Tensor, adds: bool) -> None:
        block = sum_block_numel(part.numel(), self._comm.kernels)
        block_bytes = min(part.numel(), block) * torch.float32.itemsize if self._dtype != torch.float32 else 0
        self._ledger.add(_EXCHANGE, block_bytes)
        try:
            _mean_in_rank_order(self._rows, part, adds, partial(self._comm.blocks, block_numel=block))
        finally:
            self._ledger.remove(_EXCHANGE, block_bytes)

    def _buffer(self, hops_passed: int, shape: tuple[int, int]) -> Buffer:
        """What is sent before the first hop, or received by a later one. The last part may be smaller than others."""
        key = hops_passed, shape
        if key not in self._buffers:
            numel = shape[0] * shape[1]
            self._buffers[key] = Buffer(self._ledger, _EXCHANGE, numel, self._dtype, self._comm.device)
        return self._buffers[key]

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
    """Where an fp32 sum is made: in the target, else in the first row, which is not read again; None: in scratch.

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
