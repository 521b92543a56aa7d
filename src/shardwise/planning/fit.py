"""Whether a configuration fits: one rule for the table, the search and the advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.config import Config
from shardwise.errors import ConfigError
from shardwise.planning.hardware import Hardware
from shardwise.sizes import format_bytes

DRY_RUN_HEADROOM = 0.03
"""The part of a GPU that stays free: as much as a dry run may be off (`benchmarks/plan_accuracy.py`)."""
ARITHMETIC_HEADROOM = 0.15
"""The same for arithmetic, which `test_planning_estimate` holds to the dry run within this."""


@dataclass(frozen=True)
class Fit:
    """`condition`: what must be true of a machine that was not described whole. `note`: why it does not fit."""

    fits: bool
    condition: str = ""
    note: str = ""
    is_supported: bool = True


def headroom(is_dry_run: bool) -> float:
    return DRY_RUN_HEADROOM if is_dry_run else ARITHMETIC_HEADROOM


def is_supported(config: Config) -> bool:
    """Whether this version can train so."""
    return not _refusal(config)


def _refusal(config: Config) -> str:
    from shardwise.engine.initialize import check_supported

    try:
        check_supported(config)
    except ConfigError as refusal:
        return str(refusal)
    return ""


def device_budget(on: Hardware) -> int:
    """What the engine may take of a GPU's memory by arithmetic: `offload.device_memory` for it."""
    return int((1 - ARITHMETIC_HEADROOM) * on.gpu_bytes) - on.reserved_bytes


def judge(config: Config, peak_bytes: int, tiers: Mapping[str, int], on: Hardware, is_dry_run: bool = False) -> Fit:
    """`peak_bytes` of a rank with what is reserved, `tiers` in bytes of a rank."""
    if refusal := _refusal(config):
        return Fit(False, note=refusal, is_supported=False)
    needed = {tier: size * (on.gpus // on.nodes) for tier, size in tiers.items() if size}
    rooms = {"host": on.host_bytes, "disk": on.disk_bytes}
    known = {tier: room for tier, room in rooms.items() if room is not None}
    tight = next((tier for tier in needed if tier in known and needed[tier] > known[tier]), None)
    if tight is not None:
        return Fit(False, note=f"{tight} memory too small")
    unknown = [f"the {tier} has {format_bytes(size)}" for tier, size in needed.items() if tier not in known]
    condition = f"if {' and '.join(unknown)}" if unknown else ""
    return Fit(peak_bytes <= (1 - headroom(is_dry_run)) * on.gpu_bytes, condition)
