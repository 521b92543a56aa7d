"""What a search says about pipelines: whether one would be faster than what was found without, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from shardwise.planning.estimate import estimate
from shardwise.planning.hardware import Hardware
from shardwise.planning.planner import judge, order_for
from shardwise.planning.seconds import device_for, sketched
from shardwise.planning.workload import ModelSpec, Workload
from shardwise.timing.device import DeviceTimes

MOST_STAGES = 64
_SCHEDULE = "1F1B"


class PipelineCandidate(NamedTuple):
    """The fastest preset that fits with `pp` stages; `cost` is the seconds of a step."""

    cost: float
    pp: int
    preset: str
    micro_batches: int
    bubble: float

    def __str__(self) -> str:
        how = f"{_SCHEDULE}, {self.micro_batches} micro-batches"
        return f"pp {self.pp} under {self.preset} ({how}) waits {self.bubble:.0%} of a step"


def about_pipelines(
    model: ModelSpec, workload: Workload, on: Hardware, cost: float | None, device: DeviceTimes | None = None
) -> str:
    """Whether a pipeline would be faster than the best found without one of `cost` seconds; None if nothing fits."""
    if model.dimensions is None or workload.lora is not None:
        return "No pipeline was tried: stages are cut by layers, which are known of models by name, without adapters."
    most = min(on.gpus, model.dimensions.layers, MOST_STAGES)
    sizes = [pp for pp in range(2, most + 1) if on.gpus % pp == 0]
    times = device_for(on, device)
    found = [made for pp in sizes if (made := _candidate(model, workload, on, pp, times)) is not None]
    if not found:
        return "No pipeline: none fits these GPUs."
    best = min(found)
    if cost is None:
        return f"Nothing fits without a pipeline. The fastest with one: {best}. See --pp {best.pp}."
    if best.cost < cost:
        part = f"{best.cost / cost:.2f} of the first above"
        return f"A pipeline may be faster: {best}, and takes {part}. See --pp {best.pp}."
    return (
        f"No pipeline: the fastest, {best} and takes {best.cost / cost:.2f} times as long as the first above. One pays "
        "where the links between nodes are too slow for ZeRO."
    )


def _candidate(
    model: ModelSpec, workload: Workload, on: Hardware, pp: int, device: DeviceTimes
) -> PipelineCandidate | None:
    """By arithmetic, with as many samples per step as without a pipeline."""
    assert model.dimensions is not None
    count = workload.accumulation * pp
    share = (pp - 1) / (count + pp - 1)  # what `bubble` finds for 1F1B, at once
    step = replace(workload, accumulation=count)
    numel, layers = model.parameters // pp, -(-model.dimensions.layers // pp)
    stage = ModelSpec(model.name, numel, numel, replace(model.dimensions, layers=layers))
    # The ranks of one stage are neighbours, on as few nodes as hold them.
    part = replace(
        on, gpus=on.gpus // pp, nodes=max(1, on.nodes // pp) if on.nodes % pp == 0 or pp % on.nodes == 0 else 1
    )
    hidden_bytes = workload.tokens * model.dimensions.hidden * 2
    rates = on.rates.or_typical()
    link_s = 2 * hidden_bytes * count / rates["node_link" if on.nodes > 1 else "gpu_link"]
    for preset in order_for(part.shape, count):
        config = step.config(preset)
        made = estimate(stage, step, config, part.shape)
        kept = made.categories.get("activations", 0) * (pp - 1) + 2 * hidden_bytes * count
        if judge(config, made.peak_bytes + kept + on.reserved_bytes, made.tiers, part).fits:
            # The ranks of a stage do one of `pp` equal parts of the work.
            work_s = sketched(model, step, config, part.shape, device).step_s / pp
            cost = (work_s + link_s) / (1 - share)
            return PipelineCandidate(cost, pp, preset, count, share)
    return None
