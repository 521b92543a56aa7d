"""Which states rest on the device: under a memory budget, and for a while between steps.

Under a budget, as many units' states as fit stay on the device, in forward order. The first units stay, because the
forward begins with them: it computes on them while the states of the others are still being copied. How much room there
is depends on the activations, whose size is unknown before they exist. So every unit that may be offloaded starts
offloaded, two steps are measured, and what fits into the rest of the budget becomes resident.

Between steps another program may need the GPU: in reinforcement learning, a server that generates. `states_on_host`
moves masters, optimizer states and weights that rest sharded to host memory, and back before the next step. Their
buffers move as they are, with every view of them, so no other part of the engine sees a difference; a forward fills its
units from the host. Replicated weights, which forwards compute with, stay; masters that a forward computes with (those
of sharded weights in fp32) are on the device again after it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch

from shardwise.comm import Comm
from shardwise.config.costs import moments_of
from shardwise.config.sections import Offload
from shardwise.errors import ConfigError, DiskError
from shardwise.machine.memory import host_share_bytes
from shardwise.memory import Entry, Kind, Ledger, Tier
from shardwise.offload.context import OffloadContext, bucket_numel, host_memory
from shardwise.offload.disk_file import shortage
from shardwise.offload.pinned import HostMemory
from shardwise.offload.staging import Staging, staging_bytes
from shardwise.optim import Updater
from shardwise.optim.host_update import host_share
from shardwise.optim.optimizers import single
from shardwise.unit import Unit
from shardwise.unit.plan import UnitPlan
from shardwise.unit.saved_tensors import storage_of
from shardwise.unit.state_view import TensorView
from shardwise.unit.weights import WeightsState

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

    def place(self, plans: Sequence[UnitPlan], moments: int) -> list[UnitPlan]:
        """The plans of units whose optimizer makes `moments` bytes an element, with the policies changed: on the device
        what must stay there, because of the configured ratio or a host that is too small, and on the host instead of a
        disk what the host's budget has room for.
        """
        sizes = [offloaded_bytes(plan, moments) for plan in plans]
        away = [
            size["host"] + size["disk"] if plan.policy.trainable else 0 for plan, size in zip(plans, sizes, strict=True)
        ]
        uses_disk = any(plan.policy.uses_disk for plan in plans)
        host = self._settings.host_memory
        if host == "auto":  # this rank's share of what is free on its host, the same on all ranks
            host = int(min(self._comm.everyone.share_object(host_share_bytes(), "the room on the host")))
        self._host_bytes = host
        stays = must_stay(away, self._settings.ratio, None if uses_disk else host)
        cached = stays + self._cached(sizes[stays:], staging_bytes(sum(size["disk"] for size in sizes[stays:])))
        placed = []
        for number, plan in enumerate(plans):
            policy = plan.policy
            if number < cached:
                policy = policy.on_device() if number < stays else policy.cached()
            placed.append(dataclasses.replace(plan, policy=policy))
        return placed

    def begin(self, updater: Updater | None) -> None:
        """Before the first step. What is updated on the host is chosen among what will stay there."""
        if updater is not None and self._settings.device_memory is None:
            self._choose_hosted(updater)

    def spend(self, units: Sequence[Unit], updater: Updater, staging: Staging | None) -> bool:
        """After the measured steps: move the states of as many units to the device as the budget has room for; returns
        whether it did."""
        self._steps += 1
        if self._settings.device_memory is None or self._steps > _MEASURED_STEPS:
            return False
        if self._steps == 1 and self._comm.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._comm.device)
        if self._steps < _MEASURED_STEPS:
            return False
        away = [unit for unit in units if unit.states.is_streamed]
        count = stay([unit.states.size_bytes for unit in away], self._room_bytes())
        for unit in away[:count]:
            unit.make_resident(updater.optimizer)
        if staging is not None:
            self._leave_disk(away[count:], updater, staging)
        if count:
            updater.account()
        self._choose_hosted(updater)
        return True

    def _cached(self, sizes: Sequence[Mapping[str, int]], buffer_bytes: int) -> int:
        """How many units of those of which something shall rest on the disk have all of it on the host."""
        if self._host_bytes is None:
            return 0
        room = self._host_bytes - sum(size["host"] for size in sizes) - buffer_bytes
        return stay([size["disk"] for size in sizes], room)

    def _leave_disk(self, units: Sequence[Unit], updater: Updater, staging: Staging) -> None:
        """Move units from the disk to the host, where others have made room."""
        states = [unit.states for unit in units]
        sizes = [Counter(host=each.size_bytes - each.disk_bytes, disk=each.disk_bytes) for each in states]
        for unit in units[: self._cached(sizes, staging.most_bytes)]:
            unit.leave_disk(updater.optimizer)

    def _choose_hosted(self, updater: Updater) -> None:
        settings = self._settings
        if settings.update == "host":
            updater.use_host(1.0)
        elif settings.update == "split":
            updater.use_host(host_share(self._comm) if settings.host_share is None else settings.host_share)

    def _room_bytes(self) -> int:
        """What is left of the budget at the peak, on the rank that has least."""
        device, budget = self._comm.device, self._settings.device_memory
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device)
            # Segments are not filled to the last byte.
            free = (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)) * 19 // 20
        else:
            peak, free = self._ledger.by_tier(at_peak=True).get("device", 0), host_share_bytes()
        room = (free if budget == "auto" or budget is None else budget) - peak
        return int(min(self._comm.everyone.share_object(room, "the room on the device")))


def offloaded_bytes(plan: UnitPlan, moments: int) -> Counter[str]:
    """What rests of one rank's shard of a unit on each tier below the device."""
    sizes: Counter[str] = Counter()
    for part in plan.policy.resting(moments):
        if part.tier != "device":
            sizes[part.tier] += part.bytes_each * plan.layout.shard_numel
    return sizes


def open_offload(
    plans: Sequence[UnitPlan], moments: int, settings: Offload, comm: Comm, ledger: Ledger, host: HostMemory | None
) -> OffloadContext:
    """What the offloaded states share, with this rank's files if anything rests on a disk.

    The files' room is reserved here: all ranks can, or none continues. A collective if there are files.
    """
    host = host or host_memory(settings, comm.device)
    numel = sum(plan.layout.shard_numel for plan in plans if offloaded_bytes(plan, moments))
    on_disk = [plan for plan in plans if plan.policy.uses_disk]
    if not on_disk:
        return OffloadContext(comm.device, ledger, settings, numel, host)
    largest = max(4 * min(plan.layout.shard_numel, bucket_numel(settings, numel)) for plan in on_disk)
    sizes = _file_bytes(on_disk, moments)
    staging, failure, demands = None, None, []
    try:
        staging = Staging(ledger, settings, host, largest, sum(sizes))
        demands = staging.demands(*sizes)
    except (ConfigError, DiskError) as error:
        failure = error
    everyone = comm.everyone  # ranks of one tp group share a disk too
    reason = shortage(everyone.share_object(demands, "the room on the disk"), everyone.rank)
    if reason is not None and failure is None:
        failure = DiskError(errno.ENOSPC, reason)
    if staging is not None and failure is None:
        try:
            staging.reserve(*sizes)
        except DiskError as error:
            failure = error
    everyone.fail_together(failure, "the files on the disk")
    return OffloadContext(comm.device, ledger, settings, numel, host, staging)


def _file_bytes(plans: Sequence[UnitPlan], moments: int) -> tuple[int, int]:
    """What weights, and all else, take on the disk."""
    disk_bytes = sum(offloaded_bytes(plan, moments)["disk"] for plan in plans)
    weights_bytes = sum(
        part.bytes_each * plan.layout.shard_numel
        for plan in plans
        for part in plan.policy.resting(moments)
        if part.kind == "weights" and part.tier == "disk"
    )
    return weights_bytes, disk_bytes - weights_bytes


def moments_each(optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes an element of the states that an optimizer will make."""
    if optimizer is None:
        return 0
    return max(moments_of(type(each).__name__, each.defaults) for each in single(optimizer))


@contextlib.contextmanager
def states_on_host(
    units: Sequence[Unit], optimizer: torch.optim.Optimizer | None, ledger: Ledger, host: HostMemory
) -> Iterator[None]:
    """Within it, the states of `units` rest in `host` memory. Between steps, with sharded weights released."""
    device = units[0].comm.device
    for unit in units:
        unit.synchronize()
    _wait(device)  # gathers of other streams read the buffers
    computing = {unit.weights.storage_id for unit in units}
    on_device = [buffer for buffer in ledger.buffers if buffer.live and buffer.entry.tier is Tier.DEVICE]
    buffers = [buffer for buffer in on_device if storage_of(buffer.tensor) not in computing]
    values = [v for unit in units for v in _values(unit, optimizer) if v.device.type == device.type]
    moved: list[tuple[Entry, Entry]] = []
    try:
        for buffer in buffers:
            buffer.offload(host.zeros(buffer.tensor.numel(), buffer.tensor.dtype))
        for value in values:
            value.data = host.zeros(value.numel(), value.dtype).view(value.shape).copy_(value)
        counted = [entry for entry in ledger.live if entry.kind is Kind.OPTIM and entry.tier is Tier.DEVICE]
        moved.extend((entry, ledger.move(entry, Tier.HOST)) for entry in counted)
        _bind(units)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # other programs see only what torch has given back
        yield
    finally:
        if units[0].weights.state is not WeightsState.FREED:
            for buffer in buffers:
                buffer.fetch()
            for value in values:
                value.data = value.to(device, copy=True)
            for entry, resting in moved:
                ledger.move(resting, entry.tier)
            _bind(units)


def _values(unit: Unit, optimizer: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    """What rests of a unit on the device and is in no buffer: the optimizer's states, and averages."""
    for piece in unit.weights.pieces if optimizer is not None and not unit.states.holds_moments else ():
        for value in optimizer.state.get(piece.param, {}).values():  # type: ignore[union-attr]  # not None here
            if isinstance(value, torch.Tensor) and value.ndim:
                yield value
    for average in unit.averages:
        if isinstance(average, TensorView):
            yield average.tensor


def _bind(units: Sequence[Unit]) -> None:
    for unit in units:
        unit.weights.bind_pieces()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
