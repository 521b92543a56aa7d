"""What to say when the device has no memory left: what was held, what was asked for, what would hold less."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from shardwise.config import Config
from shardwise.config.costs import resting, resting_bytes
from shardwise.config.presets import PRESETS
from shardwise.memory.ledger import Ledger
from shardwise.sizes import format_bytes
from shardwise.unit.unit import Unit

_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")


def explain(error: BaseException, config: Config, units: Sequence[Unit], ledger: Ledger) -> str:
    """The lines to add to torch's message."""
    asked = _ASKED.search(str(error))
    held = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in sorted(ledger.by_kind().items())) or "nothing"
    lines = [
        f"shardwise held {format_bytes(ledger.total_bytes)} of this rank's memory ({held}) when torch "
        + (f"asked for {asked[1]}" if asked else "asked for more")
        + "; the rest is activations and what else your program keeps.",
        "What would hold less:",
    ]
    return "\n".join([*lines, *(f"  - {line}" for line in _remedies(config, units))])


def _remedies(config: Config, units: Sequence[Unit]) -> Iterator[str]:
    parameters, world_size = sum(unit.layout.numel for unit in units), units[0].comm.world_size if units else 1
    now = _resting_bytes(config, parameters, world_size)
    least = now
    for name, placement in PRESETS.items():
        other = _resting_bytes(config.model_copy(update={"placement": placement}), parameters, world_size)
        if other < least:
            least = other
            yield f"preset {name}: {format_bytes(other)} at rest on the device, where it is {format_bytes(now)} now"
    if config.precision.weights_dtype == "fp32":
        yield "precision.compute bf16: weights, gradients and activations take half the bytes while they are used"
    if not config.checkpointing.enabled:
        yield "checkpointing.enabled true: the activations of one block at a time, instead of all"
    yield "a smaller micro-batch, and batch.accumulation higher to make up for it: activations shrink with it"
    if config.placement.weights.sharding == "sharded" and config.runtime.prefetch:
        largest = max((unit.weights.full_bytes for unit in units), default=0)
        yield f"runtime.prefetch 0: one unit less is gathered at a time (up to {format_bytes(largest)})"
    yield f"more ranks: what is sharded is cut by their number, now {world_size}"


def _resting_bytes(config: Config, parameters: int, world_size: int) -> int:
    return round(resting_bytes(resting(config), parameters, world_size, "device"))
