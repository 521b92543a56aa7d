"""The search: the fastest configurations that fit, by the model of time in `seconds`.

It varies the preset, the micro-batch and the accumulation, recomputation and, under offload, how many units keep their
states on the device: as many as fit, by the solver that the engine itself uses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwise.engine.residency import stay
from shardwise.planning.arithmetic import moved_bytes, sent_bytes
from shardwise.planning.estimate import away_bytes, estimate
from shardwise.planning.hardware import Hardware
from shardwise.planning.planner import device_budget, judge, order_for
from shardwise.planning.seconds import device_for, sketched
from shardwise.planning.workload import ModelSpec, Workload
from shardwise.sizes import format_bytes
from shardwise.timing.device import DeviceTimes

LARGEST_MICRO_BATCH = 64


@dataclass(frozen=True)
class Candidate:
    """A configuration that fits.

    resident       the fraction of the states that may be offloaded but stays on the device
    device_memory  the budget under which the engine keeps that fraction on the device
    cost           seconds of a step, by the model of time
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


def search(
    model: ModelSpec, workload: Workload, hardware: Hardware, count: int = 5, device: DeviceTimes | None = None
) -> list[Candidate]:
    """The `count` fastest that fit, best first, with as many samples per step as `workload`."""
    samples = workload.micro_batch * workload.accumulation
    steps = [
        replace(workload, micro_batch=size, accumulation=samples // size, checkpointing=checkpointing)
        for size in range(1, min(samples, LARGEST_MICRO_BATCH) + 1)
        for checkpointing in (False, True)
        if samples % size == 0
    ]
    times = device_for(hardware, device)
    found = [_candidate(model, step, hardware, preset, times) for step in steps for preset in order_for(hardware, 1)]
    fitting = [candidate for candidate in found if candidate is not None]
    return sorted(fitting, key=lambda candidate: (candidate.cost, candidate.peak_bytes))[:count]


def _candidate(
    model: ModelSpec, workload: Workload, on: Hardware, preset: str, device: DeviceTimes
) -> Candidate | None:
    """None if it does not fit, or if all states could stay on the device, as under the preset without offload."""
    config = workload.config(preset)
    estimated = estimate(model, workload, config, on.shape)
    peak = estimated.peak_bytes + on.reserved_bytes
    units = away_bytes(model, config, on.gpus)
    budget = device_budget(on)
    staying = stay(units, budget + on.reserved_bytes - peak)
    if not sum(units):
        units, staying = [1], 0
    if staying == len(units):
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
        cost=sketched(model, workload, config, on.shape, device, resident if estimated.tiers else 0.0).step_s,
    )


def render(candidates: list[Candidate]) -> RenderableType:
    """A table of the candidates."""
    if not candidates:
        return Text("\nNothing fits, with any preset, micro-batch or recomputation.", style="bold")
    moves = any(each.moved_bytes_per_sample for each in candidates)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    columns = ["", "preset", "micro-batch", "K", "recompute", "s/step", "peak GB", "sent GB"]
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
            f"{each.cost:.3g}",
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
