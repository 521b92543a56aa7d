"""The only module that calls collectives.

Gathers and reductions are two channels, each with process groups of its own, so that a gather issued ahead never
queues behind a reduction. Bytes sent are counted by kind when they are issued. At W = 1 the same code sends nothing.

A reduction is an exchange: every rank sends to each other rank the part of the gradients that the other one owns, and
adds up what it receives in rank order. So the sum depends on the values alone. Gloo's own reduce-scatter is an
all-reduce inside: it sends twice the bytes, and from W = 3 on its bits depend on where buffers are cut.

Every operation is checked (see `agreement`). Over Gloo on the CPU, operations are sends and receives, and tags keep
them apart; elsewhere the ranks meet over each operation that is new.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d as c10d

from shardwise.comm.agreement import Agreement, Wire, poll_interval_s
from shardwise.comm.log import Ticket

# Renamed in torch 2.13, where the old name warns.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_GATHER, _REDUCE = "gather", "reduce"  # the channels: sequences of operations in one order on all ranks
_CHANNELS = (_GATHER, _REDUCE)
_WAKING_TAG = 0x7FFFFFFF


class Handle(Protocol):
    """A pending collective."""

    def wait(self) -> Any: ...


class _Ways(NamedTuple):
    """The groups of one channel: what goes to higher ranks, and what comes from them.

    A Gloo connection carries both directions, and while a send fills it, its thread polls it for arrivals. On busy
    cores an exchange of 6 MB takes an eighth less time over two groups (benchmarks/gloo_ways.py), at the price of twice
    the sockets and threads.
    """

    up: Any
    down: Any

    def between(self, source: int, target: int) -> Any:
        return self.up if source < target else self.down


class _Done:
    def wait(self) -> None:
        pass


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


DONE: Handle = _Done()


class Comm(ABC):
    """What the engine asks of a data-parallel group: `ProcessGroupComm` sends, the plan's dry run only counts.

    rank, world_size  of this process in the group
    device            where the tensors of its operations are
    kernels           the kind of device that work is cut for: `device.type`, except in a dry run
    sent_bytes        bytes that this rank has sent, by kind
    micro_step        the number of the micro-batch in its step: reductions of different ones are different operations

    `unit` names the unit whose values an operation carries.
    """

    rank: int
    world_size: int
    device: torch.device
    kernels: str
    sent_bytes: Counter[str]
    micro_step: int

    @abstractmethod
    def gather(self, full: torch.Tensor, kind: str, unit: str = "") -> Handle:
        """Fill `full` from all ranks; each rank provides its own W-th part of it, in place."""

    @property
    @abstractmethod
    def rows_received(self) -> int:
        """How many rows `exchange` receives: those of all ranks, or of all others."""

    @abstractmethod
    def exchange(
        self, received: torch.Tensor, sent: torch.Tensor, kind: str, unit: str = ""
    ) -> tuple[Handle, list[torch.Tensor]]:
        """Send row w of `sent` to rank w. The list is every rank's row for this one, in order, once the handle is done.

        `received` has `rows_received` rows. With one row fewer than ranks, this rank's own row is that of `sent`.
        """

    @abstractmethod
    def blocks(self, tensor: torch.Tensor, block_numel: int) -> Sequence[torch.Tensor]:
        """A long tensor in parts that are processed one after the other."""

    @abstractmethod
    def share(self, values: torch.Tensor, name: str = "norm", channel: str = _REDUCE) -> torch.Tensor:
        """A few values of every rank, on every rank: shape [W, *values.shape]. A control message, ordered among the
        operations of one channel."""

    @abstractmethod
    def share_object(self, value: Any, name: str = "object") -> list[Any]:
        """A small picklable value of every rank, on every rank. It synchronizes, so a step does not use it."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int = 0, unit: str = "") -> None:
        """Copy rank `source`'s values to every rank, and wait. Used at start-up and by writes, not in a step."""

    @abstractmethod
    def note(self, what: str) -> None:
        """Record an event that sends nothing but must happen on all ranks or on none, such as an interrupted pass."""

    @property
    @abstractmethod
    def is_checked(self) -> bool:
        """Whether operations are checked for agreement with other ranks."""

    @property
    def has_failed(self) -> bool:
        """Whether the ranks cannot continue, because one of them is gone or does something else."""
        return False

    @abstractmethod
    def begin_close(self) -> None:
        """From here on, an operation that cannot finish is dropped without an error."""

    @abstractmethod
    def close(self) -> None:
        """Release the process groups."""

    def _count(self, kind: str, size_bytes: int) -> None:
        self.sent_bytes[kind] += size_bytes * (self.world_size - 1) // self.world_size


class ProcessGroupComm(Comm):
    """Collectives over one data-parallel group, asynchronous, counted and checked."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.device = device
        self.kernels = device.type
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.sent_bytes = Counter()
        self.micro_step = 0
        ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        # A part of the world cannot create groups without the other ranks, and groups that it can create alone cannot
        # be created twice: there both channels share the group that was given.
        is_world = len(ranks) == dist.get_world_size()
        backend = _backend(None if is_world else group, device)
        self._sends_directly = device.type == "cpu" and "gloo" in backend
        self._waits_on_device = device.type == "cuda" and "nccl" in backend
        self._own: list[Any] = []
        self._timeout = _timeout(None if is_world else group, device)
        self._groups = {channel: self._ways(channel, ranks, None if is_world else group) for channel in _CHANNELS}
        # Without tags, what runs in one group is one channel.
        self._channels = {channel: channel for channel in _CHANNELS}
        if not self._own and not self._sends_directly:
            self._channels[_REDUCE] = _GATHER
        self._agreement: Agreement | None = None
        if self.world_size > 1 and "fake" not in backend:
            store = _store(self._groups[_GATHER].up, self.rank)
            wire = Wire(self._break_groups, self._device_error, self._timeout.total_seconds())
            self._agreement = Agreement(store, self.rank, self.world_size, is_world, wire, poll_interval_s())

    def _ways(self, channel: str, ranks: list[int], given: Any) -> _Ways:
        """The groups of a channel: made here, unless one was `given`; two if ranks send to each other directly."""
        if given is not None:
            return _Ways(given, given)
        with _errors_left_to_us():
            made = [
                dist.new_group(ranks, timeout=self._timeout, group_desc=channel)
                for _ in range(1 + self._sends_directly)
            ]
        self._own += made
        return _Ways(made[0], made[-1])

    def gather(self, full: torch.Tensor, kind: str, unit: str = "") -> Handle:
        if self.world_size == 1 or not full.numel():
            return DONE
        self._count(kind, full.nbytes)
        ticket = self._issue(_GATHER, f"{'gather' if kind == 'gather' else f'gather ({kind})'} {unit}", full.numel())
        return self._gather(ticket, full)

    def _gather(self, ticket: Ticket, full: torch.Tensor) -> Handle:
        """Over Gloo every rank sends its part to each other rank, into place. Gloo's own all-gather copies through a
        second buffer of the full size, which the ledger cannot see, and takes twice as long."""
        parts = full.view(self.world_size, -1)
        if self._sends_directly:
            mine = dict.fromkeys(range(self.world_size), parts[self.rank])
            return self._send_directly(mine, dict(enumerate(parts)), ticket)
        group = self._groups[ticket.channel].up
        with self._explaining(ticket):
            work = getattr(dist, _ALL_GATHER)(full.view(-1), parts[self.rank], group=group, async_op=True)
        return self._checked(ticket, [work])

    @property
    def rows_received(self) -> int:
        return self.world_size - self._sends_directly

    def exchange(
        self, received: torch.Tensor, sent: torch.Tensor, kind: str, unit: str = ""
    ) -> tuple[Handle, list[torch.Tensor]]:
        self._count(kind, sent.nbytes)
        ticket = self._issue(_REDUCE, f"{kind} {unit}", sent.numel())
        if not self._sends_directly:
            group = self._groups[_REDUCE].up
            with self._explaining(ticket):
                work = dist.all_to_all_single(received.view(-1), sent.view(-1), group=group, async_op=True)
            return self._checked(ticket, [work]), list(received)
        rows = [*received[: self.rank], sent[self.rank], *received[self.rank :]]
        return self._send_directly(dict(enumerate(sent)), dict(enumerate(rows)), ticket), rows

    def _send_directly(
        self, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor], ticket: Ticket
    ) -> Handle:
        """Send `sent[w]` to each other rank w and receive `received[w]` from it, with the tag of the operation."""
        ways, mine, tag = self._groups[ticket.channel], self.rank, ticket.tag
        # Each rank starts with the next one, so that not all send to the same rank.
        others = [(mine + step) % self.world_size for step in range(1, self.world_size)]
        with self._explaining(ticket):
            receives = [
                dist.irecv(received[rank], group=ways.between(rank, mine), group_src=rank, tag=tag)
                for rank in reversed(others)
            ]
            sends = [dist.isend(sent[rank], group=ways.between(mine, rank), group_dst=rank, tag=tag) for rank in others]
        return self._checked(ticket, receives, sends)

    def blocks(self, tensor: torch.Tensor, block_numel: int) -> Sequence[torch.Tensor]:
        return tensor.split(block_numel) if tensor.numel() else ()

    def share(self, values: torch.Tensor, name: str = "norm", channel: str = _REDUCE) -> torch.Tensor:
        if self.world_size == 1:
            return values.unsqueeze(0)
        everyone = values.new_empty(self.world_size, *values.shape)
        self._count("control", everyone.nbytes)
        everyone[self.rank] = values
        self._gather(self._issue(channel, f"share {name}", everyone.numel()), everyone).wait()
        return everyone

    def share_object(self, value: Any, name: str = "object") -> list[Any]:
        if self.world_size == 1:
            return [value]
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self.device)
        sizes = self.share(torch.tensor([mine.numel()], device=self.device), f"{name} (size)").flatten().tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        padded[: mine.numel()] = mine
        rows = self.share(padded, name).cpu()
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def broadcast(self, tensor: torch.Tensor, source: int = 0, unit: str = "") -> None:
        if self.world_size == 1 or not tensor.numel():
            return
        if self._sends_directly:
            # Gloo's broadcast takes no tag, so a gather checks first that all ranks are about to issue it.
            ticket = self._issue(_REDUCE, f"broadcast {unit}", tensor.numel())
            everyone = torch.zeros(self.world_size)
            self._count("control", everyone.nbytes)
            self._gather(ticket, everyone).wait()
        else:
            ticket = self._issue(_GATHER, f"broadcast {unit}", tensor.numel())
        with self._explaining(ticket):
            work = dist.broadcast(tensor, group=self._groups[_GATHER].up, group_src=source, async_op=True)
        # A wait of the engine's, not one of the user's outside of it: every rank has issued this operation
        # (test_agreement.test_a_slow_broadcast_is_no_standstill).
        self._checked(ticket, [work]).wait()

    def note(self, what: str) -> None:
        if self._agreement is not None:
            self._agreement.note(_CHANNELS, what)

    @property
    def is_checked(self) -> bool:
        return self._agreement is not None

    @property
    def has_failed(self) -> bool:
        return self._agreement is not None and self._agreement.failure is not None

    def begin_close(self) -> None:
        if self._agreement is not None:
            self._agreement.is_ending = True

    def close(self) -> None:
        if self._agreement is not None:
            self._agreement.close()
        for group in self._own:
            if dist.is_initialized():
                dist.destroy_process_group(group)

    def _issue(self, channel: str, text: str, numel: int) -> Ticket:
        place = f" of micro-batch {self.micro_step}" if self.micro_step and channel == _REDUCE else ""
        channel = self._channels[channel]
        if self._agreement is None:
            return Ticket(channel, 0, text, 0)
        return self._agreement.issue(channel, f"{text}{place}, {numel} elements", self._sends_directly)

    def _checked(self, ticket: Ticket, works: list[Any], sends: Sequence[Any] = ()) -> Handle:
        if self._agreement is None:
            return works[0] if works else DONE
        if self._waits_on_device:
            for work in works:
                self._agreement.track(ticket, work)
        return _Checked(self._agreement, ticket, _present(works), _present(sends))

    @contextlib.contextmanager
    def _explaining(self, ticket: Ticket) -> Iterator[None]:
        """Raise an error of the backend as its reason: which rank is gone, and what the others wait for."""
        try:
            yield
        except RuntimeError as error:
            if self._agreement is not None and not isinstance(error, torch.OutOfMemoryError):
                self._agreement.explain(ticket, error)
            raise

    def _device_error(self) -> str | None:
        """The error that NCCL's watchdog met in one of these groups."""
        if not self._waits_on_device:
            return None
        for group in self._own:
            error = str(group._get_backend(self.device).get_error().name)
            if error != "SUCCESS":
                return error
        return None

    def _break_groups(self) -> None:
        """End all waits in these groups, on this rank and on the others, because no rank can continue."""
        groups = list({id(group): group for ways in self._groups.values() for group in ways}.values())
        if self._waits_on_device:
            self._abort(groups)
            return
        for group in groups:
            # A receive that times out breaks all connections of a Gloo group, which ends every wait on them. A receive
            # over a connection that its rank has closed already breaks nothing, so each rank is tried.
            for step in range(1, self.world_size):
                other = (self.rank + step) % self.world_size
                with contextlib.suppress(RuntimeError):
                    receive = dist.irecv(torch.empty(1), group=group, group_src=other, tag=_WAKING_TAG)
                    assert receive is not None
                    receive.wait(timedelta(milliseconds=1))

    def _abort(self, groups: Sequence[Any]) -> None:
        """Abort NCCL groups together: an abort waits for the device, where the kernels of the other groups never end
        (tests/test_deaths_gpu.py)."""
        backend = groups[0]._get_backend(self.device)
        with contextlib.suppress(RuntimeError):
            backend._group_start()
            for group in groups:
                group.abort()
            backend._group_end()


def _present(works: Sequence[Any]) -> list[Any]:
    """torch returns None for an operation in which this rank has no part."""
    return [work for work in works if work is not None]


def _backend(group: Any, device: torch.device) -> str:
    """The backend for this device's tensors: a group may have several, even if the user named none."""
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(",") if ":" in pair)
    return dict(pairs).get(device.type) or str(dist.get_backend(group))


def _timeout(group: Any, device: torch.device) -> timedelta:
    """The timeout of a group, which groups made from it get too: `new_group` would give them torch's default."""
    timeout: timedelta = c10d.default_pg_timeout
    with contextlib.suppress(RuntimeError, AttributeError):  # some backends have no such option
        timeout = (group if group is not None else c10d._get_default_group())._get_backend(device).options._timeout
    return timeout


@contextlib.contextmanager
def _errors_left_to_us() -> Iterator[None]:
    """Have the watchdog of NCCL groups that are made within abort their operations on an error, unless the user chose
    otherwise. By default it ends the process at once, before the error can name the rank that died."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    if name in os.environ:
        yield
        return
    os.environ[name] = "2"
    try:
        yield
    finally:
        del os.environ[name]


def _store(group: Any, rank: int) -> PrefixStore:
    """The part of the store for one engine of a group. Engines are numbered in the world's own store: ranks create them
    in the same order, but one process may have been in another world before."""
    of_group = PrefixStore(f"shardwise/{group.group_name}", c10d._get_default_store())
    return PrefixStore(str(of_group.add(f"engines/{rank}", 1)), of_group)
