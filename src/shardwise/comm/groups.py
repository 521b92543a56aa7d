"""The process groups that an engine's collectives run in, how they end, and how any group ends at exit.

Each channel has groups of its own (`ChannelGroups`), and so has each axis of several nodes.

By default torch's watchdog ends the process as soon as a communicator fails, before the error can name the rank that
died; where it is told not to, it still holds the process for a minute to write its own record. So our groups are made
without either, and aborted together by one thread each. A group that has failed is never destroyed: its destructor
holds Python's lock while it waits for a thread that waits for that lock (tests/test_deaths_gpu.py).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shardwise.config.shape import AXES, NodeShape
from shardwise.machine.process import ending_error, start_thread

ABORT_S = 30.0
END_S = 10.0
"""How long the end of a process may wait for a group to be destroyed."""
_WAKING_TAG = 0x7FFFFFFF
_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",  # the watchdog sleeps four times as long after an error
}


def set_timeout(group: Any, timeout_s: float) -> None:
    """Give a group, or with None the world, another timeout. Groups that are made from it for an engine get it too."""
    c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


@contextlib.contextmanager
def errors_left_to_us() -> Iterator[None]:
    """Within it, new NCCL groups get a watchdog that only reports errors, unless the user has configured it."""
    ours = {name: value for name, value in _SETTINGS.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


def abort(groups: Sequence[Any]) -> None:
    """Abort groups side by side: an abort waits for the device, where the kernels of the other groups never end."""
    for group in {*groups, dist.group.WORLD}:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # its destructor never runs, not even at exit
    threads = [start_thread(_abort, group, name="shardwise-abort") for group in groups]
    for thread in threads:
        thread.join(ABORT_S)


def break_off(groups: Sequence[Any]) -> None:
    """End all waits in these groups, on this rank and on the others, because no rank can continue."""
    over_nccl = [group for group in groups if "nccl" in str(dist.get_backend_config(group)).lower()]
    if over_nccl:
        abort(over_nccl)
    for group in groups:
        if group not in over_nccl:
            break_connections(group)


def break_connections(group: Any) -> None:
    """`break_off` for a group over Gloo.

    A receive that times out breaks all connections of the group, which ends every wait on them. A receive over a
    connection that its rank has closed already breaks nothing, so each rank is tried.
    """
    for step in range(1, group.size()):
        other = (group.rank() + step) % group.size()
        with contextlib.suppress(RuntimeError):
            receive = dist.irecv(torch.empty(1), group=group, group_src=other, tag=_WAKING_TAG)
            assert receive is not None
            receive.wait(timedelta(milliseconds=1))


def _abort(group: Any) -> None:
    with contextlib.suppress(RuntimeError):
        group.abort()


def end_groups(groups: Sequence[Any]) -> None:
    """Destroy groups in limited time, or end the process: a thread inside torch while the interpreter ends would abort
    it."""

    def work() -> None:
        for group in groups:
            with contextlib.suppress(Exception):  # destroyed already, or a rank that has ended closed the connections
                dist.destroy_process_group(group)

    ending = threading.Thread(target=work, daemon=True)
    ending.start()
    ending.join(END_S)
    if ending.is_alive():
        print(f"shardwise: another rank has not left the process group after {END_S:g} s", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)


def end_world_at_exit() -> None:
    """Destroy the default process group when this process exits normally, if it is still the one of now. NCCL warns of
    one that is not destroyed."""
    atexit.register(_end_world, dist.group.WORLD, os.getpid())


def _end_world(group: dist.ProcessGroup | None, owner: int) -> None:
    # Not in a forked child, whose parent still uses the group, and not after an exception: other ranks may be blocked
    # in a collective, and communicators wait for them.
    is_left_alone = os.getpid() != owner or ending_error() is not None
    if not is_left_alone and dist.is_initialized() and dist.group.WORLD is group:
        end_groups([group])


class Ways(NamedTuple):
    """The groups of one channel: `up` for messages to higher ranks, `down` for those to lower ones.

    A Gloo connection carries both directions, and while a send fills it, its thread polls it for arrivals. On busy
    cores an exchange of 6 MB takes an eighth less time over two groups (benchmarks/gloo_ways.py), at the price of twice
    the sockets and threads.
    """

    up: Any
    down: Any

    def between(self, source: int, target: int) -> Any:
        return self.up if source < target else self.down


class ChannelGroups:
    """The groups of ZeRO's ranks; `rank` and `size` are those in them.

    `group` is one of the user's, or None for all ranks. `members` instead lists the ranks of every such group of the
    world: if all processes make their groups together, each channel gets groups of its own.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        members: Sequence[Sequence[int]],
        channels: Sequence[str],
    ) -> None:
        given = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        self._members = [list(ranks) for ranks in members] or [given]
        ranks = next(ranks for ranks in self._members if dist.get_rank() in ranks)
        self.rank = ranks.index(dist.get_rank())
        self.size = len(ranks)
        self.is_world = len(ranks) == dist.get_world_size()
        # A part of the world cannot create groups without the other ranks, and groups that it can create alone cannot
        # be created twice: there both channels share the group that was given.
        shared = None if self.is_world or members else group
        self.backend = _backend(shared, device)
        self.sends_directly = device.type == "cpu" and "gloo" in self.backend
        """Whether operations are sends and receives between pairs of ranks."""
        self.waits_on_device = device.type == "cuda" and "nccl" in self.backend
        """Whether a wait only orders streams of the device and does not block the host."""
        self.timeout = _timeout(shared, device)
        self.own: list[Any] = []
        """The groups that were made here."""
        self._device = device
        self.whole = {channel: self._ways(channel, shared) for channel in channels}
        """The groups of all ranks, by channel."""
        self.along = {(channel, axis): ways for channel, ways in self.whole.items() for axis in AXES["sharded"]}
        """The groups of the ranks along an axis: all ranks, unless there are several nodes."""
        self._breaking, self._is_broken = threading.Lock(), False

    def add_axes(self, shape: NodeShape) -> None:
        """Make groups for the axes of several nodes. A collective of the world."""
        for axis in AXES["sharded"]:
            starts = range(0, self.size, shape.per_node) if axis == "inner" else range(shape.per_node)
            along = [[ranks[at] for at in shape.along(axis, start)] for ranks in self._members for start in starts]
            for channel in self.whole:
                group = self._new(along, f"{channel}, {axis}")
                self.along[channel, axis] = Ways(group, group)

    def device_error(self) -> str | None:
        """The error that NCCL's watchdog met in one of these groups."""
        if not self.waits_on_device:
            return None
        for group in self.own:
            error = str(group._get_backend(self._device).get_error().name)
            if error != "SUCCESS":
                return error
        return None

    def break_off(self) -> None:
        """End all waits in these groups, on this rank and on the others, because no rank can continue."""
        every = (*self.whole.values(), *self.along.values())
        groups = list({id(group): group for ways in every for group in ways if group is not None}.values())
        if self.waits_on_device:
            with self._breaking:  # the thread that polls and the main thread may meet the failure at once
                if not self._is_broken:
                    self._is_broken = True
                    abort(groups)
            return
        for group in groups:
            break_connections(group)

    def destroy(self) -> None:
        for group in self.own:
            if dist.is_initialized():
                dist.destroy_process_group(group)
        # The last references: threads and sockets of a group live until they are dropped, and Gloo's threads wake up a
        # hundred times a second (test_a_destroyed_engine_leaves_no_threads).
        self.own, self.whole, self.along = [], {}, {}

    def _ways(self, channel: str, given: Any) -> Ways:
        """The groups of a channel: made here, unless one was `given`; two if ranks send to each other directly. A rank
        alone sends nothing and needs none, with their threads and sockets."""
        if given is not None or self.size == 1:
            return Ways(given, given)
        made = [self._new(self._members, channel) for _ in range(1 + self.sends_directly)]
        return Ways(made[0], made[-1])

    def _new(self, members: Sequence[Sequence[int]], described: str) -> Any:
        """A group for each of `members`, which every process of the world makes in the same order: this rank's own."""
        own = None
        with errors_left_to_us():
            for ranks in members:
                group = dist.new_group(list(ranks), timeout=self.timeout, group_desc=described)
                if dist.get_rank() in ranks:
                    own = group
        self.own.append(own)
        return own


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
