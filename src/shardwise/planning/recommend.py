"""Which preset to take: the fastest that fits. Tried in this order, for what each adds to a step:

zero1     sends no more than plain data parallelism, at any number of micro-batches
zero2     the same with one micro-batch; one more reduction for each further one
zero3     half as much again, for every micro-batch
offload   states cross to the host and back once a step
nvme      and to the disk
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.planning.fit import headroom, judge
from shardwise.planning.hardware import Hardware
from shardwise.planning.workload import DEFAULT_TARGETS, Model, Workload, from_dimensions
from shardwise.sizes import format_bytes

if TYPE_CHECKING:
    from shardwise.planning.planner import Row

ORDER = ("zero1", "zero2", "zero3", "zero1_offload", "zero2_offload", "zero3_offload", "zero3_nvme")
LORA_RANK = 16


@dataclass(frozen=True)
class Advice:
    """One preset, or None where nothing fits, and why."""

    preset: str | None
    reason: str


def advise(rows: Sequence[Row], model: Model, workload: Workload, hardware: Hardware) -> Advice:
    """The first in `ORDER` that fits."""
    by_name = {row.preset: row for row in rows}
    order = [name for name in ORDER if name in by_name] or [row.preset for row in rows]
    chosen = next((name for name in order if by_name[name].fits), None)
    if chosen is None:
        least = min(rows, key=lambda row: (not row.is_supported, row.peak_bytes))
        short = least.note or _short(least, hardware)
        return Advice(
            None, f"nothing fits: {least.preset} needs least, and {short}{_lora_hint(model, workload, hardware)}"
        )
    refused = [by_name[name] for name in order[: order.index(chosen)]]
    return Advice(chosen, _why(by_name[chosen], refused, by_name, model, workload, hardware))


def _why(
    row: Row, refused: Sequence[Row], rows: dict[str, Row], model: Model, workload: Workload, hardware: Hardware
) -> str:
    why = "the fastest that fits"
    if refused:
        last = refused[-1]
        short = last.note or f"needs {format_bytes(last.peak_bytes)} of {format_bytes(hardware.gpu_bytes)}"
        why += f": {last.preset}{':' if last.note else ''} {short}"
    elif hardware.gpus == 1:
        why += "; on one GPU there is nothing to shard"
    elif "zero3" in rows and row.preset != "zero3":
        more = rows["zero3"].wire_bytes / max(1, row.wire_bytes)
        saved = row.peak_bytes - rows["zero3"].peak_bytes
        part = f"{max(0, saved) / hardware.gpu_bytes:.0%} of it"
        why += f"; zero3 would free {format_bytes(max(0, saved))} more a GPU, {part}, and send {more:g} times as much"
    if row.condition:
        why += f", {row.condition}"
    offloads = "offload" in row.preset or "nvme" in row.preset
    return why + (_lora_hint(model, workload, hardware) if offloads else "")


def _short(row: Row, hardware: Hardware) -> str:
    if row.margin >= 0:
        return f"only {row.margin:.0%} of each GPU are left: {headroom(row.is_dry_run):.0%} must be, for errors"
    return f"{format_bytes(row.peak_bytes - hardware.gpu_bytes)} of memory are missing on each GPU"


def _lora_hint(model: Model, workload: Workload, hardware: Hardware) -> str:
    """Whether adapters would do without leaving the device."""
    from shardwise.planning.estimate import estimate

    if model.dimensions is None or workload.lora is not None:
        return ""
    adapted = from_dimensions(
        model.dimensions, (LORA_RANK, tuple(t for t in DEFAULT_TARGETS if t in model.dimensions.linears()))
    )
    for preset in ("zero2", "zero3"):
        config = workload.config(preset)
        needed = estimate(adapted, workload, config, hardware.gpus).peak_bytes + hardware.reserved_bytes
        if judge(config, needed, {}, hardware).fits:
            return f". LoRA of rank {LORA_RANK} would do under {preset}: {format_bytes(needed)}"
    return ""
