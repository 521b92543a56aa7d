"""Whether a preset fits, and which one to take: the fastest that fits. Presets are tried in the order of their cost:

zero1     sends no more than plain data parallelism, for any number of micro-batches
zero2     sends the same with one micro-batch, and one more reduction for each further one
zero3     sends half as much again, for every micro-batch
offload   states cross to the host and back once per step
nvme      and to the disk
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.config import Config
from shardwise.engine import initialize
from shardwise.errors import ConfigError
from shardwise.planning.estimate import estimate
from shardwise.planning.hardware import Hardware
from shardwise.planning.workload import DEFAULT_TARGETS, ModelSpec, Workload, from_dimensions
from shardwise.sizes import format_bytes

ORDER = ("zero1", "zero2", "zero3", "zero1_offload", "zero2_offload", "zero3_offload", "zero3_nvme")
LORA_RANK = 16
DRY_RUN_HEADROOM = 0.03
"""The fraction of a GPU that must stay free: the error that a dry run may have (`benchmarks/plan_accuracy.py`)."""
ARITHMETIC_HEADROOM = 0.15
"""The same for arithmetic; `test_planning_estimate.py` holds arithmetic to the dry run within this."""


@dataclass(frozen=True)
class Fit:
    """Whether a configuration fits.

    condition  what must be true of parts of the machine whose size was not given
    note       why it does not fit, if not for lack of GPU memory
    """

    fits: bool
    condition: str = ""
    note: str = ""
    is_supported: bool = True


@dataclass(frozen=True)
class PlanRow:
    """One preset of a plan. Bytes of `categories` are of one rank, bytes of `tiers` (host, disk) of one node.

    margin      the free fraction of a GPU's memory
    wire_share  the time of sending over that of computing, if the machine's rates are known
    condition   if not empty, the preset fits only under this condition
    note        why it does not fit
    """

    preset: str
    categories: dict[str, int]
    tiers: dict[str, int]
    wire_bytes: int
    margin: float
    fits: bool
    wire_share: float | None = None
    startup_bytes: int | None = None
    note: str = ""
    condition: str = ""
    is_supported: bool = True

    @property
    def is_dry_run(self) -> bool:
        """Whether its figures come from a dry run; otherwise they come from arithmetic."""
        return self.startup_bytes is not None

    @property
    def peak_bytes(self) -> int:
        return sum(self.categories.values())


@dataclass(frozen=True)
class Advice:
    """The preset to take, or None if nothing fits, and the reason."""

    preset: str | None
    reason: str


def headroom(is_dry_run: bool) -> float:
    """The fraction of a GPU that must stay free, because predictions have errors."""
    return DRY_RUN_HEADROOM if is_dry_run else ARITHMETIC_HEADROOM


def is_supported(config: Config) -> bool:
    """Whether this version of the engine can train with a configuration."""
    return not _refusal(config)


def _refusal(config: Config) -> str:
    try:
        initialize.check_supported(config)
    except ConfigError as refusal:
        return str(refusal)
    return ""


def device_budget(on: Hardware) -> int:
    """Bytes of a GPU that the engine may use, judged by arithmetic: the value for `offload.device_memory`."""
    return int((1 - ARITHMETIC_HEADROOM) * on.gpu_bytes) - on.reserved_bytes


def judge(config: Config, peak_bytes: int, tiers: Mapping[str, int], on: Hardware, is_dry_run: bool = False) -> Fit:
    """Whether a rank's `peak_bytes`, reserved bytes included, and its bytes on other `tiers` fit the machine."""
    if refusal := _refusal(config):
        return Fit(False, note=refusal, is_supported=False)
    needed = {tier: size * (on.gpus // on.nodes) for tier, size in tiers.items() if size}
    sizes = {"host": on.host_bytes, "disk": on.disk_bytes}
    known = {tier: size for tier, size in sizes.items() if size is not None}
    tight = next((tier for tier in needed if tier in known and needed[tier] > known[tier]), None)
    if tight is not None:
        return Fit(False, note=f"{tight} memory too small")
    unknown = [f"the {tier} has {format_bytes(size)}" for tier, size in needed.items() if tier not in known]
    condition = f"if {' and '.join(unknown)}" if unknown else ""
    return Fit(peak_bytes <= (1 - headroom(is_dry_run)) * on.gpu_bytes, condition)


def advise(rows: Sequence[PlanRow], model: ModelSpec, workload: Workload, hardware: Hardware) -> Advice:
    """The first preset in `ORDER` that fits."""
    by_name = {row.preset: row for row in rows}
    order = [name for name in ORDER if name in by_name] or [row.preset for row in rows]
    chosen = next((name for name in order if by_name[name].fits), None)
    if chosen is None:
        least = min(rows, key=lambda row: (not row.is_supported, row.peak_bytes))
        shortage = least.note or _shortage(least, hardware)
        reason = f"nothing fits: {least.preset} needs the least, and {shortage}"
        return Advice(None, reason + _lora_hint(model, workload, hardware))
    tried = [by_name[name] for name in order[: order.index(chosen)]]
    reason = _reason(by_name[chosen], tried, by_name, hardware)
    offloads = "offload" in chosen or "nvme" in chosen
    return Advice(chosen, reason + (_lora_hint(model, workload, hardware) if offloads else ""))


def _reason(row: PlanRow, tried: Sequence[PlanRow], rows: Mapping[str, PlanRow], hardware: Hardware) -> str:
    reason = "the fastest that fits"
    if tried:
        last = tried[-1]
        short = last.note or f"needs {format_bytes(last.peak_bytes)} of {format_bytes(hardware.gpu_bytes)}"
        reason += f": {last.preset}{':' if last.note else ''} {short}"
    elif hardware.gpus == 1:
        reason += "; with one GPU there is nothing to shard"
    elif "zero3" in rows and row.preset != "zero3":
        more = rows["zero3"].wire_bytes / max(1, row.wire_bytes)
        saved = max(0, row.peak_bytes - rows["zero3"].peak_bytes)
        part = f"{saved / hardware.gpu_bytes:.0%} of its memory"
        reason += f"; zero3 would free {format_bytes(saved)} more per GPU, {part}, and send {more:g} times as much"
    return reason + (f", {row.condition}" if row.condition else "")


def _shortage(row: PlanRow, hardware: Hardware) -> str:
    if row.margin >= 0:
        return (
            f"only {row.margin:.0%} of each GPU would be free: {headroom(row.is_dry_run):.0%} must be, as the figures "
            "may be off by that"
        )
    return f"each GPU has {format_bytes(row.peak_bytes - hardware.gpu_bytes)} too little memory"


def _lora_hint(model: ModelSpec, workload: Workload, hardware: Hardware) -> str:
    """Says if adapters would fit without offload."""
    if model.dimensions is None or workload.lora is not None:
        return ""
    targets = tuple(name for name in DEFAULT_TARGETS if name in model.dimensions.linears())
    adapted = from_dimensions(model.dimensions, (LORA_RANK, targets))
    for preset in ("zero2", "zero3"):
        config = workload.config(preset)
        needed = estimate(adapted, workload, config, hardware.gpus).peak_bytes + hardware.reserved_bytes
        if judge(config, needed, {}, hardware).fits:
            return f". LoRA of rank {LORA_RANK} would fit under {preset}: {format_bytes(needed)} per GPU"
    return ""
