"""The search: the fastest configurations that fit, ranked by the model of time in `arithmetic`.

It varies the preset, the micro-batch and the accumulation, recomputation and, under offload, how many units keep their
states on the device: as many as fit, by the solver that the engine itself uses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwise.engine.residency import stay
from shardwise.planning.arithmetic import cost_s, moved_bytes, sent_bytes
from shardwise.planning.estimate import away_bytes, estimate
from shardwise.planning.hardware import Hardware
from shardwise.planning.planner import device_budget, judge, order_for
from shardwise.planning.workload import ModelSpec, Workload
from shardwise.sizes import format_bytes

LARGEST_MICRO_BATCH = 64


@dataclass(frozen=True)
class Candidate:
    """A configuration that fits.

    resident       the fraction of the states that may be offloaded but stays on the device
    device_memory  the budget under which the engine keeps that fraction on the device
    cost           for ranking only
    """

    preset: str
    micro_batch: int
    accumulation: int
    checkpointing: bool
    resident: float
    device_memory: int | None
    peak_bytes: int
    sent_bytes_per_sample: float
    moved_bytes_per_sample: float
    condition: str
    cost: float

    def workload(self, given: Workload) -> Workload:
        """`given` with the values found."""
        return replace(
            given, micro_batch=self.micro_batch, accumulation=self.accumulation, checkpointing=self.checkpointing
        )


def search(model: ModelSpec, workload: Workload, hardware: Hardware, count: int = 5) -> list[Candidate]:
    """The `count` fastest that fit, best first, with as many samples per step as `workload`."""
    samples = workload.micro_batch * workload.accumulation
    steps = [
        replace(workload, micro_batch=size, accumulation=samples // size, checkpointing=checkpointing)
        for size in range(1, min(samples, LARGEST_MICRO_BATCH) + 1)
        for checkpointing in (False, True)
        if samples % size == 0
    ]
    found = [_candidate(model, step, hardware, preset) for step in steps for preset in order_for(hardware, 1)]
    fitting = [candidate for candidate in found if candidate is not None]
    return sorted(fitting, key=lambda candidate: (candidate.cost, candidate.peak_bytes))[:count]


def _candidate(model: ModelSpec, workload: Workload, on: Hardware, preset: str) -> Candidate | None:
    """None if it does not fit, or if all of it could stay on the device, as under the preset without offload.

    What is frozen does not: it rests where the preset has the weights.
    """
    config = workload.config(preset)
    estimated = estimate(model, workload, config, on.shape)
    peak = estimated.peak_bytes + on.reserved_bytes
    units = away_bytes(model, config, on.gpus)
    budget = device_budget(on)
    staying = stay(units, budget + on.reserved_bytes - peak)
    if not sum(units):
        units, staying = [1], 0
    keeps_frozen = not model.frozen or config.placement.weights.tier == "device"
    if staying == len(units) and keeps_frozen:
        return None
    staying_bytes = sum(units[:staying])
    resident = staying_bytes / sum(units)
    # The host must have room for all states: the engine starts with all of them offloaded, and measures.
    fit = judge(config, peak + staying_bytes, estimated.tiers, on)
    if not fit.fits:
        return None
    moved = moved_bytes(config, int(model.trainable * (1 - resident)), model.frozen, on.gpus)
    samples = workload.micro_batch * workload.accumulation
    return Candidate(
        preset=preset,
        micro_batch=workload.micro_batch,
        accumulation=workload.accumulation,
        checkpointing=workload.checkpointing,
        resident=resident if estimated.tiers else 1.0,
        device_memory=budget if staying else None,
        peak_bytes=peak + staying_bytes,
        sent_bytes_per_sample=sent_bytes(preset, model, workload, on.shape) / samples,
        moved_bytes_per_sample=(moved.up + moved.down) / samples,
        condition=fit.condition,
        cost=cost_s(preset, model, workload, on, moved),
    )


def render(candidates: list[Candidate]) -> RenderableType:
    """A table of the candidates."""
    if not candidates:
        return Text("\nNothing fits, with any preset, micro-batch or recomputation.", style="bold")
    moves = any(each.moved_bytes_per_sample for each in candidates)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    columns = ["", "preset", "micro-batch", "K", "recompute", "peak GB", "sent GB"]
    for name in [*columns, *(["moved GB", "resident"] if moves else [])]:
        table.add_column(name, justify="left" if name == "preset" else "right", no_wrap=True)
    table.add_column("")  # the condition may wrap, so that figures need not be cut
    for number, each in enumerate(candidates, start=1):
        cells = [
            str(number),
            each.preset,
            str(each.micro_batch),
            str(each.accumulation),
            "yes" if each.checkpointing else "no",
            f"{each.peak_bytes / 1e9:.1f}",
            f"{each.sent_bytes_per_sample / 1e9:.3g}",
        ]
        if moves:
            cells += [f"{each.moved_bytes_per_sample / 1e9:.3g}", f"{each.resident:.0%}"]
        table.add_row(*cells, each.condition)
    title = Text("\nThe fastest that fit, best first; sent and moved are per rank and sample")
    budgets = {each.device_memory for each in candidates if each.device_memory is not None}
    notes = [Text(f"states stay resident under offload.device_memory: {format_bytes(size)}") for size in budgets]
    return Group(title, table, *notes)
