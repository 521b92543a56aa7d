"""Whether a configuration fits a machine, and the preset to take: the fastest that fits.

The fastest is that of the model of time (`seconds`). Of presets that it cannot tell apart, the first in this order is
taken, that of what they send:

zero1     sends no more than plain data parallelism, for any number of micro-batches
zero2     sends the same with one micro-batch, and one more reduction for each further one
zero3     sends half as much again, for every micro-batch
hybrid    (on several nodes) sends that within a node, and out of it as little as zero1: with several micro-batches less
          than zero2
offload   states cross to the host and back once per step
nvme      and to the disk
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardwise.config import Config
from shardwise.config.presets import PRESETS
from shardwise.config.shape import NodeShape
from shardwise.engine import initialize
from shardwise.errors import ConfigError
from shardwise.estimate.estimate import estimate
from shardwise.estimate.hardware import Hardware
from shardwise.models.workload import DEFAULT_TARGETS, ModelSpec, Workload, from_dimensions
from shardwise.planning.report import Advice, Fit, PlanRow
from shardwise.sizes import format_bytes

ORDER = ("zero1", "zero2", "zero3_hybrid", "zero3", "zero1_offload", "zero2_offload", "zero3_offload", "zero3_nvme")
LORA_RANK = 16
TELLS_APART = 0.02
"""Steps whose times differ by less count as equal."""
DRY_RUN_HEADROOM = 0.03
"""The fraction of a GPU that must stay free: the error that a dry run may have (`benchmarks/plan_accuracy.py`)."""
ARITHMETIC_HEADROOM = 0.15
"""The same for arithmetic; `test_planning_estimate.py` holds arithmetic to the dry run within this."""


def presets_for(shape: NodeShape) -> tuple[str, ...]:
    """The presets that differ on some ranks: on one node, the hybrid one is zero3."""
    is_hybrid = {name: "node" in (kind.sharding for _, kind in row) for name, row in PRESETS.items()}
    return tuple(name for name in PRESETS if not (is_hybrid[name] and shape.is_flat))


def order_for(shape: NodeShape, accumulation: int) -> list[str]:
    """The presets to try, those that send the least first."""
    order = [name for name in ORDER if name in presets_for(shape)]
    if accumulation > 1 and "zero3_hybrid" in order:
        # zero2 would send each micro-batch's gradients out of the node.
        order.remove("zero3_hybrid")
        order.insert(order.index("zero2"), "zero3_hybrid")
    return order


def headroom(is_dry_run: bool) -> float:
    """The fraction of a GPU that must stay free, because predictions have errors."""
    return DRY_RUN_HEADROOM if is_dry_run else ARITHMETIC_HEADROOM


def refusal(config: Config) -> str:
    """Why this version of the engine cannot train with a configuration; empty if it can."""
    try:
        initialize.check_supported(config)
    except ConfigError as error:
        return str(error)
    return ""


def device_budget(on: Hardware) -> int:
    """Bytes of a GPU that the engine may use, judged by arithmetic: the value for `offload.device_memory`."""
    return int((1 - ARITHMETIC_HEADROOM) * on.gpu_bytes) - on.reserved_bytes


def judge(config: Config, peak_bytes: int, tiers: Mapping[str, int], on: Hardware, is_dry_run: bool = False) -> Fit:
    """Whether a rank's `peak_bytes`, reserved bytes included, and its bytes on other `tiers` fit the machine."""
    if reason := refusal(config):
        return Fit(fits=False, note=reason, is_supported=False)
    needed = {tier: size * on.shape.per_node for tier, size in tiers.items() if size}
    known = on.tier_bytes
    for tier, size in needed.items():
        if size > known.get(tier, size):
            each = f"{format_bytes(size)} for the ranks of a node together, and it has {format_bytes(known[tier])}"
            return Fit(fits=False, note=f"{tier} memory too small: {each}")
    unknown = [f"the {tier} has {format_bytes(size)}" for tier, size in needed.items() if tier not in known]
    condition = f"if {' and '.join(unknown)}" if unknown else ""
    spare = headroom(is_dry_run)
    return Fit(fits=peak_bytes <= (1 - spare) * on.gpu_bytes, spare=spare, condition=condition)


def advise(rows: Sequence[PlanRow], model: ModelSpec, workload: Workload, hardware: Hardware) -> Advice:
    """The fastest preset that fits."""
    by_name = {row.preset: row for row in rows}
    shape = hardware.zero_shape(workload.tp, workload.pp)
    order = [name for name in order_for(shape, workload.accumulation) if name in by_name] or [
        row.preset for row in rows
    ]
    chosen = _fastest([by_name[name] for name in order])
    if chosen is None:
        least = min(rows, key=lambda row: (not row.is_supported, row.peak_bytes))
        shortage = least.note or _shortage(least, hardware)
        reason = f"nothing fits: {least.preset} needs the least, and {shortage}"
        return Advice(None, reason + _lora_hint(model, workload, hardware))
    tried = [by_name[name] for name in order[: order.index(chosen)] if not by_name[name].fits]
    reason = _reason(by_name[chosen], tried, by_name, hardware)
    offloads = "offload" in chosen or "nvme" in chosen
    return Advice(chosen, reason + (_lora_hint(model, workload, hardware) if offloads else ""))


def _fastest(rows: Sequence[PlanRow]) -> str | None:
    """The fastest that fits, by the model of time; of those that it cannot tell apart, the first in the order."""
    fitting = [row for row in rows if row.fits]
    least = min((row.time.step_s for row in fitting if row.time), default=0.0)
    near = [row for row in fitting if row.time is None or row.time.step_s <= (1 + TELLS_APART) * least]
    return near[0].preset if near else None


def _reason(row: PlanRow, tried: Sequence[PlanRow], rows: Mapping[str, PlanRow], hardware: Hardware) -> str:
    reason = f"the fastest that fits, with {row.margin:.0%} of each GPU's memory to spare"
    if tried:
        reason += f"; {_why_not(tried[-1], hardware)}"
    elif hardware.gpus == 1:
        reason += "; with one GPU there is nothing to shard, so zero1, zero2 and zero3 hold about the same"
    elif "zero3" in rows and row.preset != "zero3":
        saved = max(0, row.peak_bytes - rows["zero3"].peak_bytes)
        freed = f"{format_bytes(saved)} more per GPU, {saved / hardware.gpu_bytes:.0%} of its memory"
        more = f", and send {rows['zero3'].wire_bytes / row.wire_bytes:.3g} times as much" if row.wire_bytes else ""
        reason += f"; zero3 would free {freed}{more}"
    return reason + (f", {row.condition}" if row.condition else "")


def _why_not(row: PlanRow, hardware: Hardware) -> str:
    """Why a faster preset was not taken."""
    if row.note:
        return f"{row.preset}: {row.note}"
    needs = f"{row.preset} needs {format_bytes(row.peak_bytes)} of {format_bytes(hardware.gpu_bytes)}"
    if row.margin < 0:
        return f"{needs}, {format_bytes(row.peak_bytes - hardware.gpu_bytes)} too much"
    source = "a dry run" if row.is_dry_run else "arithmetic"
    remedy = "" if row.is_dry_run else "; a dry run (--detailed) can tell"
    return f"{needs}, which leaves {row.margin:.0%} to spare, and {source} may be off by {row.spare:.0%}{remedy}"


def _shortage(row: PlanRow, hardware: Hardware) -> str:
    if row.margin >= 0:
        return (
            f"only {row.margin:.0%} of each GPU would be free: {row.spare:.0%} must be, as the figures "
            "may be off by that"
        )
    return f"each GPU has {format_bytes(row.peak_bytes - hardware.gpu_bytes)} too little memory"


def _lora_hint(model: ModelSpec, workload: Workload, hardware: Hardware) -> str:
    """Says if adapters would fit without offload."""
    if model.dimensions is None or workload.lora is not None or workload.tp * workload.pp > 1:
        return ""
    targets = tuple(name for name in DEFAULT_TARGETS if name in model.dimensions.linears())
    step = replace(workload, lora=(LORA_RANK, targets))
    adapted = from_dimensions(model.dimensions, step.lora)
    for preset in ("zero2", "zero3"):
        config = workload.config(preset)
        needed = estimate(adapted, step, config, hardware.shape).peak_bytes + hardware.reserved_bytes
        if judge(config, needed, {}, hardware).fits:
            return f". LoRA of rank {LORA_RANK} would fit under {preset}: {format_bytes(needed)} per GPU"
    return ""
