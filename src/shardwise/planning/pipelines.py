"""What every rank of a pipeline will hold and send in a step, by dry runs, and how long it waits; what a plan and a
search say about pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from shardwise.config import Config
from shardwise.config.shape import NodeShape
from shardwise.dry_run.comm import PipelineRank
from shardwise.dry_run.dry_run import Foreseen, Scenario, build_of, dry_run
from shardwise.dry_run.kernels import CUDA, kernels_for
from shardwise.errors import ConfigError
from shardwise.estimate.estimate import estimate
from shardwise.estimate.hardware import Hardware
from shardwise.estimate.seconds import device_times, sketched
from shardwise.models.built_in import Build
from shardwise.models.workload import ModelSpec, Workload
from shardwise.planning.recommend import judge, order_for
from shardwise.sizes import format_bytes
from shardwise.timing.device import DeviceTimes

MOST_STAGES = 64
_SCHEDULE = "1F1B"


@dataclass(frozen=True)
class ForeseenPipeline:
    """One rank of each place in the pipeline, and the share of a step in which they wait for each other.

    The bubble assumes stages that take equally long, and a backward that takes twice as long as a forward.
    """

    ranks: tuple[Foreseen, ...]
    bubble: float

    @property
    def fullest(self) -> Foreseen:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)


def foresee_pipeline(
    build: Build,
    config: Any = "zero2",
    world_size: int = 2,
    *,
    pp: int,
    schedule: str = "1F1B",
    micro_batches: int = 8,
    tp: int = 1,
    keep_gathered: bool = False,
    device: str | None = None,
) -> ForeseenPipeline:
    """As `foresee`, for a pipeline of `pp` stages or pairs of stages, by one of torch's schedules.

    `build` returns the model and `make_batch(rank, step)`, which returns one micro-batch. With `keep_gathered`, sharded
    weights stay gathered for a whole step.

    >>> import torch, shardwise
    >>> class Model(torch.nn.Sequential):
    ...     def forward(self, x):
    ...         return super().forward(x).square().mean()
    >>> def build():
    ...     return Model(*(torch.nn.Linear(64, 64) for _ in range(4))), lambda rank, step: {"x": torch.ones(64, 64)}
    >>> found = shardwise.foresee_pipeline(build, "zero2", 4, pp=2, micro_batches=4, device="cpu")
    >>> len(found.ranks), found.fullest.sent_bytes["pp"], found.bubble
    (2, 65536, 0.2)
    """
    from shardwise.dry_run.pipeline import bubble

    if pp < 2 or world_size % (pp * tp):
        raise ConfigError(
            f"{world_size} ranks with pp {pp} and tp {tp}: give a multiple of {pp * tp}, and pp from 2 on"
        )
    loaded, copies, kernels = Config.load(config), world_size // (pp * tp), kernels_for(device)

    def run(rank: int) -> Foreseen:
        at = PipelineRank(pp, rank, schedule, micro_batches, keep_gathered)
        return dry_run(Scenario(build, loaded, copies, kernels, tp, at))

    with torch.random.fork_rng(devices=[]):
        return ForeseenPipeline(tuple(map(run, range(pp))), round(bubble(schedule, pp, micro_batches), 4))


def foresee_stages(model: ModelSpec, workload: Workload, preset: str, ranks: int | NodeShape) -> Foreseen:
    """As `foresee_workload`, of all ranks of a pipeline: the fullest, and the peaks of all."""
    total = workload.accumulation
    count = run_micro_batches(workload.schedule, workload.pp, total)
    config = replace(workload, accumulation=1).config(preset)
    build = build_of(model, workload)
    found = []
    for rank in range(workload.pp):
        at = PipelineRank(workload.pp, rank, workload.schedule, count)
        one = dry_run(Scenario(build, config, ranks, CUDA, workload.tp, at))
        found.append(with_micro_batches(one, workload.schedule, count, total))
    fullest = max(found, key=lambda each: each.peak_bytes)
    return replace(fullest, places=tuple(each.peak_bytes for each in found))


def run_micro_batches(schedule: str, pp: int, count: int) -> int:
    """How many of a step's `count` micro-batches a dry run runs. Further ones hold no more activations where each
    forward follows a whole backward; elsewhere all are run."""
    enough = {"1f1b": pp + 1, "interleaved1f1b": 2 * pp}
    return min(count, enough.get(schedule.lower(), count))


def with_micro_batches(foreseen: Foreseen, schedule: str, seen: int, count: int) -> Foreseen:
    """The same with `count` micro-batches instead of `seen`: torch has buffers to receive each of them in, and where a
    rank has two stages it holds what it has sent until the end of a step."""
    each = foreseen.sent_bytes.get("pp", 0) // seen
    held = each if schedule.lower() == "1f1b" else 2 * each
    more = {"in flight": foreseen.categories["in flight"] + (count - seen) * held}
    sent = {**foreseen.sent_bytes, "pp": each * count}
    return replace(foreseen, categories={**foreseen.categories, **more}, sent_bytes=sent)


def pipeline_notes(workload: Workload, foreseen: Mapping[str, Foreseen]) -> list[str]:
    """What a plan with a pipeline says beside its table."""
    from shardwise.dry_run.pipeline import SCHEDULES

    pp, count = workload.pp, workload.accumulation
    notes = []
    for preset, each in foreseen.items():
        peaks = ", ".join(f"{size / 1e9:.1f}" for size in each.places)
        notes.append(f"{preset}: peaks of the {pp} places in the pipeline, in GB: {peaks} (by {workload.schedule})")
    sent = max((each.sent_bytes.get("pp", 0) for each in foreseen.values()), default=0)
    shares = ", ".join(f"{name} {share:.0%}" for name in SCHEDULES if (share := bubble_of(name, pp, count)) is not None)
    notes.append(
        f"figures are of the fullest of {pp} places; a GPU sends {format_bytes(sent)} to its neighbours in the "
        "pipeline in a step, beside what the table says"
    )
    notes.append(f"of a step of {count} micro-batches, ranks wait for each other: {shares}")
    return notes


def bubble_of(schedule: str, pp: int, count: int) -> float | None:
    """As `bubble`; None where a schedule cannot run this many micro-batches."""
    from shardwise.dry_run.pipeline import bubble  # torch's pipelining takes seconds to import

    try:
        return bubble(schedule, pp, count)
    except ConfigError:
        return None


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
    times = device_times(on, device)
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
    part = replace(on, gpus=on.gpus // pp, nodes=on.nodes // pp if on.nodes % pp == 0 else 1)
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
