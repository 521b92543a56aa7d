"""What rests where under a budget: as many units' states as fit stay on the device, in forward order.

The first units stay, because the forward begins with them: it computes on them while the states of those behind are
still on their way.

How much room there is depends on the activations, which nobody knows before they are there. So every unit that may
leave begins away from the device, two steps are taken and measured, and what fits into the rest of the budget moves in.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import torch

from shardwise.comm.comm import Comm
from shardwise.config.costs import moments_of
from shardwise.config.sections import Offload
from shardwise.errors import ConfigError, DiskError, ShardwiseError
from shardwise.memory.ledger import Ledger
from shardwise.offload.context import OffloadContext
from shardwise.offload.staging import Staging, staging_bytes
from shardwise.optim.host_share import host_share
from shardwise.optim.optimizers import members
from shardwise.optim.updater import Updater
from shardwise.partition.layout import Layout
from shardwise.partition.policy import Policy
from shardwise.unit.unit import Unit

_MEASURED_STEPS = 3
"""The first step makes the states; the next two go through everything."""


def stay(unit_bytes: Sequence[int], room_bytes: int) -> int:
    """How many units, from the first, fit into `room_bytes`.

    >>> stay([10, 10, 10], 25)
    2
    """
    return sum(total <= room_bytes for total in accumulate(unit_bytes))


def must_stay(unit_bytes: Sequence[int], ratio: float = 1.0, host_bytes: int | None = None) -> int:
    """How many units, from the first, stay so that at most the part `ratio` of all leaves, and fits the host.

    >>> must_stay([10, 10, 10, 10], ratio=0.5), must_stay([10, 10, 10, 10], host_bytes=35)
    (2, 1)
    """
    most = int(ratio * sum(unit_bytes))
    most = most if host_bytes is None else min(most, host_bytes)
    rest = sum(unit_bytes)
    count = 0
    while rest > most:
        rest -= unit_bytes[count]
        count += 1
    return count


class Budget:
    """The memory that the configuration allows, and what it is spent on."""

    def __init__(self, settings: Offload, comm: Comm, ledger: Ledger) -> None:
        self._settings = settings
        self._comm = comm
        self._ledger = ledger
        self._steps = 0
        self._host_bytes: int | None = None

    def place(self, policies: Sequence[Policy], layouts: Sequence[Layout], moments: int) -> list[Policy]:
        """The policies of units whose optimizer makes `moments` bytes an element, with what must stay on the device
        there, because of the user's ratio or a host that is too small, and on the host what its budget has room for.
        """
        sizes = [offloaded_bytes(policy, layout, moments) for policy, layout in zip(policies, layouts, strict=True)]
        away = [
            size["host"] + size["disk"] if policy.trainable else 0 for policy, size in zip(policies, sizes, strict=True)
        ]
        uses_disk = any(policy.uses_disk for policy in policies)
        host = self._host_share_bytes() if self._settings.host_memory == "auto" else self._settings.host_memory
        self._host_bytes = host
        stays = must_stay(away, self._settings.ratio, None if uses_disk else host)
        cached = stays + self._cached(sizes[stays:], staging_bytes(sum(size["disk"] for size in sizes[stays:])))
        return [
            policy.on_device() if number < stays else policy.cached() if number < cached else policy
            for number, policy in enumerate(policies)
        ]

    def begin(self, updater: Updater | None) -> None:
        """Before the first step. What is updated on the host is chosen among what will stay there."""
        if updater is not None and self._settings.device_memory is None:
            self._choose_hosted(updater)

    def spend(self, units: Sequence[Unit], updater: Updater) -> None:
        """After the measured steps: move the states of as many units to the device as the budget has room for."""
        self._steps += 1
        if self._settings.device_memory is None or self._steps > _MEASURED_STEPS:
            return
        if self._steps == 1:
            self._start_measuring()
        if self._steps < _MEASURED_STEPS:
            return
        away = [unit for unit in units if unit.states is not None and unit.states.is_updated]
        count = stay([unit.states.size_bytes for unit in away if unit.states is not None], self._room_bytes())
        for unit in away[:count]:
            unit.move_in(updater.optimizer)
        self._leave_disk(away[count:], updater)
        if count:
            updater.account()
        self._choose_hosted(updater)

    def _cached(self, sizes: Sequence[Mapping[str, int]], buffer_bytes: int) -> int:
        """How many units of those of which something shall rest on the disk have all of it on the host."""
        if self._host_bytes is None:
            return 0
        room = self._host_bytes - sum(size["host"] for size in sizes) - buffer_bytes
        return stay([size["disk"] for size in sizes], room)

    def _leave_disk(self, units: Sequence[Unit], updater: Updater) -> None:
        """Let units rest on the host, where others have made room."""
        offloaded = [unit.states for unit in units if unit.states is not None]
        staging = offloaded[0].offload.staging if offloaded else None
        if staging is not None:
            sizes = [
                Counter(host=states.size_bytes - states.disk_bytes, disk=states.disk_bytes) for states in offloaded
            ]
            for unit in units[: self._cached(sizes, staging.most_bytes)]:
                unit.leave_disk(updater.optimizer)

    def _choose_hosted(self, updater: Updater) -> None:
        settings = self._settings
        if settings.update == "host":
            updater.host(1.0)
        elif settings.update == "split":
            updater.host(host_share(self._comm) if settings.host_share is None else settings.host_share)

    def _host_share_bytes(self) -> int:
        """This rank's share of what is free on its host, the same on all ranks."""
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return int(min(self._comm.share_object(_available_host_bytes() // ranks_here, "the room on the host")))

    def _start_measuring(self) -> None:
        if self._comm.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._comm.device)

    def _room_bytes(self) -> int:
        """What is left of the budget at the peak, on the rank that has least."""
        device, budget = self._comm.device, self._settings.device_memory
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device)
            # Segments are not filled to the last byte.
            free = (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)) * 19 // 20
        else:
            peak, free = self._ledger.by_tier(at_peak=True).get("device", 0), _available_host_bytes()
        room = (free if budget == "auto" or budget is None else budget) - peak
        return int(min(self._comm.share_object(room, "the room on the device")))


def offloaded_bytes(policy: Policy, layout: Layout, moments: int) -> Counter[str]:
    """What rests of one rank's shard of a unit on each tier below the device."""
    sizes: Counter[str] = Counter()
    for part in policy.resting(moments):
        if part.tier != "device":
            sizes[part.tier] += part.bytes_each * layout.shard_numel
    return sizes


def open_disk(
    offload: OffloadContext,
    comm: Comm,
    settings: Offload,
    policies: Sequence[Policy],
    layouts: Sequence[Layout],
    moments: int,
) -> None:
    """Make this rank's files and set room aside, if anything rests on the disk. All ranks can, or none goes on."""
    pairs = [(policy, layout) for policy, layout in zip(policies, layouts, strict=True) if policy.uses_disk]
    if not pairs:
        return
    failure: ShardwiseError | None = None
    try:
        largest = max(4 * min(layout.shard_numel, offload.bucket_numel) for _, layout in pairs)
        on_disk = [offloaded_bytes(policy, layout, moments)["disk"] for policy, layout in pairs]
        offload.staging = Staging(offload.ledger, settings, comm.rank, offload.is_pinned, largest, sum(on_disk))
        weights = [
            part.bytes_each * layout.shard_numel
            for policy, layout in pairs
            for part in policy.resting(moments)
            if part.kind == "weights" and part.tier == "disk"
        ]
        offload.staging.reserve(sum(weights), sum(on_disk) - sum(weights))
    except (ConfigError, DiskError) as error:
        failure = error
    told = comm.share_object(None if failure is None else f"rank {comm.rank}: {failure}", "the room on the disk")
    if failure is not None:
        raise failure
    if others := [text for text in told if text is not None]:
        raise DiskError("; ".join(others))


def moments_each(optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes an element of the states that an optimizer will make."""
    if optimizer is None:
        return 0
    each = members(optimizer)
    return max(moments_of(type(one).__name__, one.defaults) for one in each[1:] or each)


def _available_host_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024
