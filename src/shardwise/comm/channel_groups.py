"""The process groups that an engine's collectives run in: those of each channel, and of each axis of several nodes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shardwise.comm import groups as process_groups
from shardwise.config.shape import AXES, Axis, NodeShape


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
        self._channels = {channel: self._ways(channel, shared) for channel in channels}
        self._axes: dict[tuple[str, Axis], Ways] = {}
        self._breaking, self._is_broken = threading.Lock(), False

    def of(self, channel: str) -> Ways:
        """The groups of all ranks."""
        return self._channels[channel]

    def along(self, channel: str, axis: Axis) -> Ways:
        """The groups of the ranks along an axis: all ranks, unless there are several nodes."""
        return self._axes.get((channel, axis)) or self._channels[channel]

    def add_axes(self, shape: NodeShape) -> None:
        """Make groups for the axes of several nodes. A collective of the world."""
        for axis in AXES["sharded"]:
            starts = range(0, self.size, shape.per_node) if axis == "inner" else range(shape.per_node)
            along = [[ranks[at] for at in shape.along(axis, start)] for ranks in self._members for start in starts]
            for channel in self._channels:
                group = self._new(along, f"{channel}, {axis}")
                self._axes[channel, axis] = Ways(group, group)

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
        every = (*self._channels.values(), *self._axes.values())
        groups = list({id(group): group for ways in every for group in ways}.values())
        if self.waits_on_device:
            with self._breaking:  # the thread that polls and the main thread may meet the failure at once
                if not self._is_broken:
                    self._is_broken = True
                    process_groups.abort(groups)
            return
        for group in groups:
            process_groups.break_connections(group)

    def destroy(self) -> None:
        for group in self.own:
            if dist.is_initialized():
                dist.destroy_process_group(group)
        # The last references: threads and sockets of a group live until they are dropped, and Gloo's threads wake up a
        # hundred times a second (test_a_destroyed_engine_leaves_no_threads).
        self.own, self._channels, self._axes = [], {}, {}

    def _ways(self, channel: str, given: Any) -> Ways:
        """The groups of a channel: made here, unless one was `given`; two if ranks send to each other directly."""
        if given is not None:
            return Ways(given, given)
        made = [self._new(self._members, channel) for _ in range(1 + self.sends_directly)]
        return Ways(made[0], made[-1])

    def _new(self, members: Sequence[Sequence[int]], described: str) -> Any:
        """A group for each of `members`, which every process of the world makes in the same order: this rank's own."""
        own = None
        with process_groups.errors_left_to_us():
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
