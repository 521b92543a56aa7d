"""The search: the fastest configurations that fit, by the model of time in `seconds`.

It varies the preset, the micro-batch and the accumulation, recomputation, how many GPUs of a node hold one copy of the
model together (tp) and, under offload, how many units keep their states on the device: as many as fit, by the solver
that the engine itself uses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich.console import Group, RenderableType
from rich.text import Text

from shardwise.engine.residency import stay
from shardwise.errors import ConfigError
from shardwise.estimate.arithmetic import moved_bytes, sent_by_axis, tp_bytes
from shardwise.estimate.estimate import estimate, units_of
from shardwise.estimate.hardware import Hardware
from shardwise.estimate.seconds import device_times, sketched
from shardwise.models.workload import ModelSpec, Workload
from shardwise.planning.recommend import device_budget, judge, order_for
from shardwise.sizes import format_bytes
from shardwise.tables import plain_table
from shardwise.timing.device import DeviceTimes

LARGEST_MICRO_BATCH = 64
COUNT = 5


@dataclass(frozen=True)
class Candidate:
    """A configuration that fits.

    tp             how many GPUs hold one copy of the model together
    outside_bytes  what leaves a node in a step
    tp_bytes       what a GPU sends in a step to the others of its copy of the model
    resident       the fraction of the states that may be offloaded but stays on the device
    device_memory  the budget under which the engine keeps that fraction on the device
    cost           seconds of a step, by the model of time
    """

    preset: str
    tp: int
    micro_batch: int
    accumulation: int
    checkpointing: bool
    resident: float
    device_memory: int | None
    peak_bytes: int
    sent_bytes_per_sample: float
    moved_bytes_per_sample: float
    outside_bytes: int
    tp_bytes: int
    condition: str
    cost: float

    def workload(self, given: Workload) -> Workload:
        """`given` with the values found."""
        found = {name: getattr(self, name) for name in ("tp", "micro_batch", "accumulation", "checkpointing")}
        return replace(given, **found)

    @property
    def name(self) -> str:
        return f"{self.preset} with tp {self.tp}" if self.tp > 1 else self.preset


def search(
    model: ModelSpec, workload: Workload, hardware: Hardware, device: DeviceTimes | None = None
) -> list[Candidate]:
    """All that fit, the fastest first, with as many samples per step as `workload`."""
    times = device_times(hardware, device)
    found = [
        _candidate(model, part, step, hardware, preset, times)
        for tp, part in _parts(model, workload, hardware).items()
        for step in _steps(workload, tp)
        for preset in order_for(hardware.zero_shape(tp), 1)
    ]
    fitting = [candidate for candidate in found if candidate is not None]
    return sorted(fitting, key=_rank)


def _rank(candidate: Candidate) -> tuple[float, bool, int]:
    """The faster first; of those that are equal, without a disk, and with less memory."""
    return float(f"{candidate.cost:.6e}"), "nvme" in candidate.preset, candidate.peak_bytes


def _parts(model: ModelSpec, workload: Workload, on: Hardware) -> dict[int, ModelSpec]:
    """What a GPU holds of the model for each tp: the one that was given, or all over which a node can cut it."""
    if workload.tp > 1:
        return {workload.tp: model.part(workload.tp)}
    parts = {}
    for tp in (size for size in range(1, on.shape.per_node + 1) if on.shape.per_node % size == 0):
        with contextlib.suppress(ConfigError):  # it cannot be cut into as many
            parts[tp] = model.part(tp)
    return parts


def _steps(workload: Workload, tp: int) -> list[Workload]:
    """The steps with as many samples as `workload`, which a copy on more GPUs has more of."""
    samples = workload.micro_batch * workload.accumulation * tp // workload.tp
    return [
        replace(workload, tp=tp, micro_batch=size, accumulation=samples // size, checkpointing=checkpointing)
        for size in range(1, min(samples, LARGEST_MICRO_BATCH) + 1)
        for checkpointing in (False, True)
        if samples % size == 0
    ]


def _candidate(
    whole: ModelSpec, model: ModelSpec, workload: Workload, on: Hardware, preset: str, device: DeviceTimes
) -> Candidate | None:
    """None if it does not fit, or if all of it could stay on the device, as under the preset without offload.

    What is frozen does not: it rests where the preset has the weights. `model` is what a GPU holds of the whole.
    """
    config, shape = workload.config(preset), on.zero_shape(workload.tp)
    made = units_of(model, workload, config, shape)
    # Most are refused by what rests, before their passes are followed.
    if not judge(config, made.resting.total() + on.reserved_bytes, made.tiers, on).fits:
        return None
    estimated = estimate(model, workload, config, shape)
    peak = estimated.peak_bytes + on.reserved_bytes
    units, budget = made.away_bytes, device_budget(on)
    away_bytes = sum(units)
    staying = stay(units, budget + on.reserved_bytes - peak) if away_bytes else 0
    keeps_frozen = not model.frozen or config.placement.weights.tier == "device"
    if away_bytes and staying == len(units) and keeps_frozen:
        return None
    staying_bytes = sum(units[:staying])
    resident = staying_bytes / (away_bytes or 1)
    # The host must have room for all states: the engine starts with all of them offloaded, and measures.
    fit = judge(config, peak + staying_bytes, estimated.tiers, on)
    if not fit.fits:
        return None
    moved = moved_bytes(config, int(model.trainable * (1 - resident)), model.frozen, shape.world_size)
    samples = workload.micro_batch * workload.accumulation / workload.tp
    sent, within = sent_by_axis(preset, model, workload, shape), tp_bytes(model, workload)
    return Candidate(
        preset=preset,
        tp=workload.tp,
        micro_batch=workload.micro_batch,
        accumulation=workload.accumulation,
        checkpointing=workload.checkpointing,
        resident=resident if estimated.tiers else 1.0,
        device_memory=budget if staying else None,
        peak_bytes=peak + staying_bytes,
        sent_bytes_per_sample=(sum(sent.values()) + within) / samples,
        moved_bytes_per_sample=(moved.up + moved.down) / samples,
        outside_bytes=sent["outer"] * on.shape.per_node,
        tp_bytes=within,
        condition=fit.condition,
        cost=sketched(whole, workload, config, shape, device, resident if estimated.tiers else 0.0).step_s,
    )


def why(ranked: Sequence[Candidate], given: Workload) -> str:
    """Why the first was taken, and not the best with another preset or another tp."""
    best = ranked[0]
    reasons = [f"→ {best.name}"]
    if other := next((each for each in ranked if each.tp == best.tp and each.preset != best.preset), None):
        if other.cost == best.cost:
            more = format_bytes(other.peak_bytes - best.peak_bytes)
            reasons.append(f"{other.name} would be as fast, with {more} more on each GPU")
        else:
            sent = _times(other.sent_bytes_per_sample, best.sent_bytes_per_sample)
            outside = f", and {_times(other.outside_bytes, best.outside_bytes)} out of a node"
            how = " with recomputation" if other.checkpointing and not best.checkpointing else ""
            longer = f"take {other.cost / best.cost:.2f} times as long"
            reasons.append(f"{other.name}{how} would {longer}, and send {sent}{outside * bool(best.outside_bytes)}")
    if larger := next((each for each in ranked if each.tp > best.tp), None):
        size = format_bytes(larger.tp_bytes)
        reasons.append(f"with tp {larger.tp}, the layers of each GPU would wait for {size} of activations in a step")
    if best.tp > given.tp and not any(each.tp < best.tp for each in ranked):
        reasons.append("nothing fits with less tp")
    return "; ".join(reasons)


def _times(size: float, other: float) -> str:
    factor = size / other if other else 1.0
    return "as much" if f"{factor:.2g}" == "1" else f"{factor:.2g} times as much"


_COLUMNS: dict[str, Callable[[Candidate], str]] = {
    "preset": lambda each: each.preset,
    "tp": lambda each: str(each.tp),
    "micro-batch": lambda each: str(each.micro_batch),
    "K": lambda each: str(each.accumulation),
    "recompute": lambda each: "yes" if each.checkpointing else "no",
    "s/step": lambda each: f"{each.cost:.3g}",
    "peak": lambda each: f"{each.peak_bytes / 1e9:.1f}",
    "sent": lambda each: f"{each.sent_bytes_per_sample / 1e9:.3g}",
    "out": lambda each: f"{each.outside_bytes / 1e9:.3g}",
    "moved": lambda each: f"{each.moved_bytes_per_sample / 1e9:.3g}",
    "resident": lambda each: f"{each.resident:.0%}",
}


def render(ranked: Sequence[Candidate], given: Workload) -> RenderableType:
    """A table of the first candidates, and why the first was taken."""
    candidates = ranked[:COUNT]
    if not candidates:
        return Text("\nNothing fits, with any preset, micro-batch or recomputation.", style="bold")
    cuts, leaves = any(each.tp > 1 for each in ranked), any(each.outside_bytes for each in ranked)
    moves = any(each.moved_bytes_per_sample for each in candidates)
    shown = {"tp": cuts, "out": leaves, "moved": moves, "resident": moves}
    columns = {name: cell for name, cell in _COLUMNS.items() if shown.get(name, True)}
    table = plain_table("", *columns, left=("preset",))
    table.add_column("")  # the condition may wrap, so that figures need not be cut
    for number, each in enumerate(candidates, start=1):
        table.add_row(str(number), *(cell(each) for cell in columns.values()), each.condition)
    legend = "GB; sent and moved are per rank and sample" + "; out is what leaves a node in a step" * leaves
    title = Text(f"\nThe fastest that fit, best first; {legend}")
    budgets = {each.device_memory for each in candidates if each.device_memory is not None}
    notes = [Text(f"states stay resident under offload.device_memory: {format_bytes(size)}") for size in budgets]
    return Group(title, table, Text(why(ranked, given)), *notes)
