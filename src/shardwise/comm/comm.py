"""The only module that calls collectives.

Gathers and reductions are two channels, each with process groups of its own, so that a gather issued ahead never
queues behind a reduction. Bytes sent are counted by kind when they are issued. At W = 1 the same code sends nothing.

A reduction is an exchange: every rank sends to each other rank the part of the gradients that the other one owns, and
adds up what it receives in rank order. So the sum depends on the values alone. Gloo's own reduce-scatter is an
all-reduce inside: it sends twice the bytes, and from W = 3 on its bits depend on where buffers are cut.

Ranks of several nodes reduce in two hops (`NodeShape`): over the node, then over the ranks with one local index, one in
each node. So a node sends each element once, where an exchange over all ranks sends it once for each rank of the node.
Gathers take the same hops backwards.

Every operation is checked (see `agreement`). Over Gloo on the CPU, operations are sends and receives, and tags keep
them apart; elsewhere the ranks meet over each operation that is new.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from shardwise.agreement.agreement import Agreement, Wire, poll_interval_s
from shardwise.agreement.log import Ticket
from shardwise.agreement.sight import this_host
from shardwise.agreement.store_link import numbered_store
from shardwise.comm import groups as process_groups
from shardwise.comm.groups import ChannelGroups, Ways
from shardwise.comm.interface import CHANNELS, DONE, EVERYWHERE, GATHER, REDUCE, Comm, Handle, Hop
from shardwise.comm.relay import Relay, RelayedGather, Sends, Works
from shardwise.comm.world_watch import WorldWatch
from shardwise.config.shape import Axis, NodeShape
from shardwise.errors import DisagreementError
from shardwise.machine.process import ending_error

T = TypeVar("T")

# Renamed in torch 2.13, where the old name warns.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
_OVER: dict[Axis, str] = {"inner": "in the node", "outer": "across nodes"}
# Gloo and NCCL know few dtypes of integers and 8-bit floats: what is only copied goes as bytes.
_AS_THEY_ARE = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64))


class _Checked:
    """An operation of one or several works. Each is waited for once: on a finished send Gloo would wait forever."""

    def __init__(self, agreement: Agreement, ticket: Ticket, works: list[Any], sends: list[Any]) -> None:
        self._agreement = agreement
        self._ticket = ticket
        self._works = works
        self._sends = sends

    def wait(self) -> None:
        if self._works or self._sends:
            self._agreement.wait(self._ticket, self._works, self._sends)


class ProcessGroupComm(Comm):
    """Collectives over ZeRO's ranks, asynchronous, counted and checked.

    `group` is one of the user's, or None for all ranks. `members` instead lists the ranks of every such group of the
    world: if all processes make their communicators together, they can make process groups of their own.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        members: Sequence[Sequence[int]] = (),
        reduce: Literal["exchange", "native"] = "exchange",
    ) -> None:
        self.device = device
        self.kernels = device.type
        self.sent_bytes = Counter()
        self.axis_bytes = Counter()
        self.micro_step = 0
        self._is_announced = False  # what is issued now: see `announced`
        self._groups = groups = ChannelGroups(group, device, members, CHANNELS)
        self.rank = groups.rank
        self.world_size = groups.size
        self.shape = NodeShape(1, groups.size)
        self._sends_directly = groups.sends_directly
        self._waits_on_device = self.runs_ahead = groups.waits_on_device
        self._reduces_natively = reduce == "native"
        self._relay = Relay()
        self._streams = {channel: torch.cuda.Stream(device) for channel in CHANNELS if self.runs_ahead}
        # Without tags, what runs in one group is one channel.
        self._channels = {channel: channel for channel in CHANNELS}
        if not groups.own and not self._sends_directly:
            self._channels[REDUCE] = GATHER
        self._agreement: Agreement | None = None
        if self.world_size > 1 and "fake" not in groups.backend:
            store = numbered_store(f"group {groups.whole[GATHER].up.group_name}", self.rank)
            wire = Wire(groups.break_off, groups.device_error, groups.timeout.total_seconds())
            self._agreement = Agreement(store, self.rank, self.world_size, groups.is_world, wire, poll_interval_s())
            self._agreement.hosts = self.share_object(this_host(store), "host")
        self._on_exit = partial(_end_at_exit, weakref.ref(self), os.getpid())
        if self._agreement is not None and (self._waits_on_device or self._sends_directly):
            atexit.register(self._on_exit)

    def take_shape(self, shape: NodeShape) -> None:
        """Route all operations over the axes of `shape`, the same on all ranks, from now on. Call it before any of them
        carries a unit's elements: shards lie in another order."""
        self.shape = shape
        if not shape.is_flat:
            self._groups.add_axes(shape)

    def gather(self, full: torch.Tensor, kind: str, unit: str = "", axes: Sequence[Axis] = EVERYWHERE) -> Handle:
        hops, parts = self.hops(axes), full
        if not hops or not full.numel():
            return DONE
        ticket = self._issue(GATHER, "gather" if kind == "gather" else f"gather ({kind})", full.numel(), unit)
        steps: list[tuple[Ways, Hop, torch.Tensor]] = []
        for hop in hops:
            parts = parts.view(hop.size, -1)
            self._count(kind, parts.nbytes, hop)
            steps.insert(0, (self._groups.along[ticket.channel, hop.axis], hop, _on_wire(parts)))
            parts = parts[hop.place]
        return self._gather(ticket, steps)

    def _gather(self, ticket: Ticket, steps: Sequence[tuple[Ways, Hop, torch.Tensor]]) -> Handle:
        """Over Gloo every rank sends its part to each other rank, into place. Gloo's own all-gather copies through a
        second buffer of the full size, which the ledger cannot see, and takes twice as long."""
        if self._sends_directly:
            first = self._issued(ticket, _spread, ticket.tag, *steps[0])
            if len(steps) == 1:
                return self._checked(ticket, *first)
            gather = RelayedGather(first, [partial(_spread, ticket.tag, *step) for step in steps[1:]])
            self._relay.add(gather)
            return self._checked(ticket, [gather], [Sends(gather)])
        works: list[Any] = []
        with contextlib.ExitStack() as following:
            for ways, hop, parts in steps:
                if works:  # the next hop sends what this one brings
                    following.enter_context(self.following(works[-1], ticket.channel))
                call, mine = getattr(dist, _ALL_GATHER), parts[hop.place]
                works.append(self._issued(ticket, call, parts.view(-1), mine, group=ways.up, async_op=True))
                handle = self._tracked(ticket, works[-1])
        return handle

    def rows_received(self, hop: Hop) -> int:
        return 1 if self._reduces_natively else hop.size - self._sends_directly

    def exchange(
        self, received: torch.Tensor, sent: torch.Tensor, kind: str, unit: str, hop: Hop
    ) -> tuple[Handle, list[torch.Tensor]]:
        self._count(kind, sent.nbytes, hop)
        over = "" if self.shape.is_flat else f" {_OVER[hop.axis]}"
        ticket = self._issue(REDUCE, kind, sent.numel(), f"{unit}{over}", has_tags=not self._reduces_natively)
        ways = self._groups.along[REDUCE, hop.axis]
        if self._reduces_natively:
            return self._reduce_natively(ticket, received, sent, ways.up, hop), list(received)
        if not self._sends_directly:
            flat = received.view(-1), sent.view(-1)
            work = self._issued(ticket, dist.all_to_all_single, *flat, group=ways.up, async_op=True)
            return self._tracked(ticket, work), list(received)
        parts = sent.unbind()
        rows = [*received[: hop.place], parts[hop.place], *received[hop.place :]]
        works = self._issued(ticket, _send_directly, parts, rows, ways, hop, ticket.tag)
        return self._checked(ticket, *works), rows

    def _reduce_natively(
        self, ticket: Ticket, received: torch.Tensor, sent: torch.Tensor, group: Any, hop: Hop
    ) -> Handle:
        """Gloo has no mean: there each rank divides what it sends."""
        divides = not self._waits_on_device
        if divides:
            sent.div_(hop.size)
        operation = dist.ReduceOp.SUM if divides else dist.ReduceOp.AVG
        call, flat = getattr(dist, _REDUCE_SCATTER), (received.view(-1), sent.view(-1))
        return self._tracked(ticket, self._issued(ticket, call, *flat, op=operation, group=group, async_op=True))

    @contextlib.contextmanager
    def following(self, handle: Handle, channel: str = REDUCE) -> Iterator[None]:
        """On a stream of the channel's where the device orders operations.

        Tensors of these operations belong to the compute stream, which waits for the last of them before it frees any.
        """
        stream = self._streams.get(channel)
        if stream is None:
            handle.wait()
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            handle.wait()
            yield

    def blocks(self, tensor: torch.Tensor, block_numel: int) -> Sequence[torch.Tensor]:
        numel = tensor.numel()
        return tensor.split(block_numel) if numel > block_numel else (tensor,) if numel else ()

    def share(self, values: torch.Tensor, name: str = "norm", channel: str = REDUCE) -> torch.Tensor:
        if self.world_size == 1:
            return values.unsqueeze(0)
        everyone = values.new_zeros(self.world_size, *values.shape)
        self._count("control", everyone.nbytes)
        everyone[self.rank] = values
        self._gather_rows(self._issue(channel, f"share {name}", everyone.numel()), everyone).wait()
        return everyone

    def _gather_rows(self, ticket: Ticket, rows: torch.Tensor) -> Handle:
        """A row of every rank, in rank order."""
        all_ranks = Hop("inner", self.world_size, self.rank)
        parts = _on_wire(rows.view(self.world_size, -1))
        return self._gather(ticket, [(self._groups.whole[ticket.channel], all_ranks, parts)])

    def read(self, shared: torch.Tensor) -> torch.Tensor:
        try:
            values = shared.cpu()
        except RuntimeError as error:  # the device may report the broken operation here
            if self._agreement is None:
                raise
            self._agreement.explain(None, error)
        if self._agreement is not None:
            self._agreement.check()
        return values

    def confirm(self) -> None:
        if self._agreement is not None and self._waits_on_device:
            self.read(torch.zeros(1, device=self.device))  # comes after what the compute stream has been given
            torch.cuda.synchronize(self.device)
            self._agreement.check()

    def share_object(self, value: Any, name: str = "object", channel: str = REDUCE) -> list[Any]:
        if self.world_size == 1:
            return [value]
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self.device)
        try:
            own_size = torch.tensor([mine.numel()], device=self.device)
            sizes = self.read(self.share(own_size, f"{name} (size)", channel)).flatten().tolist()
            padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
            padded[: mine.numel()] = mine
            with self.announced():
                rows = self.read(self.share(padded, name, channel))
            return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]
        except Exception as error:  # pickle raises whatever bytes make it raise
            if self._agreement is None or isinstance(error, DisagreementError):
                raise
            self._agreement.explain(None, error)

    def broadcast(self, tensor: torch.Tensor, source: int = 0, unit: str = "") -> None:
        if self.world_size == 1 or not tensor.numel():
            return
        if self._sends_directly:
            # Gloo's broadcast takes no tag, so a gather checks first that all ranks are about to issue it.
            ticket = self._issue(REDUCE, "broadcast", tensor.numel(), unit)
            everyone = torch.zeros(self.world_size)
            self._count("control", everyone.nbytes)
            self._gather_rows(ticket, everyone).wait()
        else:
            ticket = self._issue(GATHER, "broadcast", tensor.numel(), unit)
        if tensor.ndim:
            tensor = _on_wire(tensor)
        group = self._groups.whole[GATHER].up
        work = self._issued(ticket, dist.broadcast, tensor, group=group, group_src=source, async_op=True)
        # A wait of the engine's, not one of the user's outside of it: every rank has issued this operation
        # (test_agreement.test_a_slow_broadcast_is_no_standstill).
        self._tracked(ticket, work).wait()

    def note(self, what: str) -> None:
        if self._agreement is not None:
            self._agreement.note(CHANNELS, what)

    @contextlib.contextmanager
    def announced(self) -> Iterator[None]:
        self._is_announced = True
        try:
            yield
        finally:
            self._is_announced = False

    def name_units(self, names: Sequence[str]) -> None:
        if self._agreement is not None:
            self._agreement.name_units(names)

    @property
    def is_checked(self) -> bool:
        return self._agreement is not None

    @property
    def has_failed(self) -> bool:
        return self._agreement is not None and self._agreement.failure is not None

    def watch_world(self, groups: Sequence[Any]) -> None:
        """Watch the ranks of all axes as well, whose `groups` are torch's."""
        self.watch = WorldWatch(groups, self._stop, 2 * poll_interval_s())

    def _stop(self, verdict: str) -> None:
        """A rank of another axis is lost: end the waits of this group too, with that reason."""
        if self._agreement is not None and self._agreement.failure is None:
            self._agreement.failure = verdict
        self._groups.break_off()

    def begin_close(self) -> None:
        if self._agreement is not None:
            self._agreement.is_ending = True

    def close(self) -> None:
        if self.watch is not None:
            self.watch.leave()
        if self._agreement is not None:
            self._agreement.close()
        if not self._relay.end(process_groups.END_S):
            self._groups.break_off()
        self._groups.destroy()
        atexit.unregister(self._on_exit)

    def end(self, has_raised: bool) -> None:
        """When the interpreter ends: break off what other ranks will not finish."""
        agreement, deadline = self._agreement, time.monotonic() + process_groups.END_S
        if agreement is None or not dist.is_initialized():
            return
        if self._sends_directly:
            if not self._relay.end(process_groups.END_S / 10 if not has_raised else 0.0):
                self._groups.break_off()
            return
        while not has_raised and not self.has_failed and not agreement.is_idle and time.monotonic() < deadline:
            time.sleep(0.05)
        if has_raised or self.has_failed or not agreement.is_idle:
            agreement.leave()
            self._groups.break_off()
            process_groups.abort([dist.group.WORLD])

    def _issue(self, channel: str, what: str, numel: int, unit: str = "", has_tags: bool = True) -> Ticket:
        place = f" of micro-batch {self.micro_step}" if self.micro_step and channel == REDUCE else ""
        text, channel = f"{f'{what} {unit}'.rstrip()}{place}, {numel} elements", self._channels[channel]
        if self._agreement is None:
            return Ticket(channel, 0, text, 0)
        return self._agreement.issue(channel, text, self._sends_directly and has_tags, unit, self._is_announced)

    def _checked(self, ticket: Ticket, works: list[Any], sends: list[Any] | None = None) -> Handle:
        if self._agreement is None:
            return works[0] if works else DONE
        return _Checked(self._agreement, ticket, works, sends or [])

    def _tracked(self, ticket: Ticket, work: Any) -> Handle:
        """An operation of the device's, or of a backend without tags."""
        if self._agreement is not None and self._waits_on_device:
            self._agreement.track(ticket, work)
        return self._checked(ticket, [work])

    def _issued(self, ticket: Ticket, call: Callable[..., T], *args: Any, **options: Any) -> T:
        """What the call returns that issues an operation."""
        if self._agreement is None:
            return call(*args, **options)
        return self._agreement.call_backend(ticket, call, *args, **options)


def _spread(tag: int, ways: Ways, hop: Hop, parts: torch.Tensor) -> Works:
    """Send this rank's part to each other rank of an axis, and receive theirs into place."""
    rows = parts.unbind()
    return _send_directly([rows[hop.place]] * hop.size, rows, ways, hop, tag)


def _send_directly(
    sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], ways: Ways, hop: Hop, tag: int
) -> Works:
    """Send `sent[w]` to each other rank w of an axis and receive `received[w]` from it, with the tag of the
    operation."""
    mine = hop.place
    # Each rank starts with the next one, so that not all send to the same rank.
    others = [(mine + step) % hop.size for step in range(1, hop.size)]
    receives = [
        dist.irecv(received[rank], group=ways.between(rank, mine), group_src=rank, tag=tag) for rank in reversed(others)
    ]
    sends = [dist.isend(sent[rank], group=ways.between(mine, rank), group_dst=rank, tag=tag) for rank in others]
    return Works(receives, sends)


def _end_at_exit(reference: weakref.ref[ProcessGroupComm], owner: int) -> None:
    comm = reference()
    if comm is not None and os.getpid() == owner:
        comm.end(has_raised=ending_error() is not None)


def _on_wire(tensor: torch.Tensor) -> torch.Tensor:
    """What is only copied, in a dtype that every backend knows."""
    return tensor if tensor.dtype in _AS_THEY_ARE else tensor.view(torch.uint8)
