"""`shardwise plan --inference`: what generating with streamed weights will hold and fetch, before it is started."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwise.errors import ConfigError
from shardwise.estimate.hardware import CONTEXT_BYTES, Hardware
from shardwise.inference.working_memory import WorkingMemory, working_memory
from shardwise.memory.placement import UnitSize, WeightPlacement, place
from shardwise.models.dimensions import Dimensions
from shardwise.partition.policy import DTYPES
from shardwise.sizes import format_bytes


@dataclass(frozen=True)
class InferencePlan:
    """What one rank will hold and fetch."""

    placement: WeightPlacement
    working: WorkingMemory
    pass_s: float

    @property
    def peak_bytes(self) -> int:
        return self.placement.device_bytes + self.working.total_bytes

    def to_dict(self) -> dict[str, Any]:
        placement = self.placement
        return {
            "peak_bytes": self.peak_bytes,
            "weights_bytes": {tier: placement.bytes_on(tier) for tier in ("device", "host", "disk")},
            "window_bytes": placement.window_bytes,
            "cache_bytes": self.working.cache_bytes,
            "activation_bytes": self.working.activation_bytes,
            "units": len(placement.units),
            "resident_units": placement.resident_units,
            "ahead": placement.ahead,
            "fetched_bytes_a_pass": placement.fetched_bytes,
            "fetch_s_a_pass": round(self.pass_s, 4),
        }

    def __str__(self) -> str:
        placement, working = self.placement, self.working
        away = [(tier, placement.bytes_on(tier)) for tier in ("host", "disk")]
        rests = ", ".join(f"{format_bytes(size)} on the {tier}" for tier, size in away if size)
        return "\n".join(
            [
                f"device peak         {format_bytes(self.peak_bytes)}",
                f"  resident weights  {format_bytes(placement.bytes_on('device'))}, "
                f"{placement.resident_units} of {len(placement.units)} units",
                f"  units in flight   {format_bytes(placement.window_bytes)}, {placement.ahead} ahead",
                f"  keys and values   {format_bytes(working.cache_bytes)}",
                f"  activations       {format_bytes(working.activation_bytes)}",
                f"weights elsewhere   {rests or 'none'}",
                f"fetched a pass      {format_bytes(placement.fetched_bytes)}, at least {self.pass_s:.3g} s",
            ]
        )


def plan_inference(of: Dimensions, on: Hardware, batch: int, context: int, precision: str) -> InferencePlan:
    """The plan for one rank of `on`, whose budgets are the memory of a GPU, of its host and of its disk."""
    itemsize = DTYPES[precision].itemsize
    working = working_memory(of, batch, context, itemsize)
    units = list(_units(of, itemsize, on.gpus))
    room = on.gpu_bytes - CONTEXT_BYTES - working.total_bytes
    ranks = on.shape.per_node
    host_bytes = on.host_bytes // ranks if on.host_bytes is not None else None
    found = place(units, "host", room)
    if host_bytes is not None and found.bytes_on("host") > host_bytes:
        found = place(units, "disk", room, host_bytes)
    rates = on.rates.or_typical()
    shares = {tier: sum(unit.shard_bytes * unit.uses for unit in _on(found, tier)) for tier in ("host", "disk")}
    # What is read from the disk also crosses the link.
    pass_s = max(sum(shares.values()) / rates["host_link"], shares["disk"] * ranks / rates["disk"])
    if on.disk_bytes is not None and found.bytes_on("disk") * ranks > on.disk_bytes:
        raise ConfigError(f"the model takes {format_bytes(of.parameters * itemsize)}, more than --disk: give more room")
    return InferencePlan(found, working, pass_s)


def _on(found: WeightPlacement, tier: str) -> list[UnitSize]:
    return [unit for unit, own in zip(found.units, found.tiers, strict=True) if own == tier]


def _units(of: Dimensions, itemsize: int, world_size: int) -> Iterator[UnitSize]:
    def unit(name: str, numel: int, uses: int = 1, stays: bool = False) -> UnitSize:
        return UnitSize(name, numel * itemsize, -(-numel * itemsize // world_size), uses, stays)

    layers = [of.layer_numel(index) for index in range(of.layers)]
    yield unit("(root)", of.parameters - sum(layers) - of.embedding_numel * (1 if of.tied else 2), stays=True)
    yield unit("embedding", of.embedding_numel, 2 if of.tied else 1)
    for index, numel in enumerate(layers):
        yield unit(f"layers.{index}", numel)
    if not of.tied:
        yield unit("head", of.embedding_numel)
