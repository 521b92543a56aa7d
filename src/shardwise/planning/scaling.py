"""From a few GPUs to many, on paper: the time and the memory of each way to train, and where it stops paying.

Each GPU keeps its micro-batches (more GPUs, larger steps), unless the samples of a step are given: then more GPUs share
them, and accumulate less.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Group, RenderableType
from rich.text import Text

from shardwise.errors import ConfigError
from shardwise.estimate.estimate import estimate
from shardwise.estimate.hardware import Hardware
from shardwise.estimate.seconds import StepTime, computing_s, device_times, sketched, step_time
from shardwise.models.workload import ModelSpec, Workload
from shardwise.planning.recommend import judge
from shardwise.tables import plain_table
from shardwise.timing.device import DeviceTimes

PER_NODE = 8
WIDTH = 150
STOPS_PAYING = 0.10
"""A way to train stops paying where more than this part of a step waits for communication."""


@dataclass(frozen=True)
class Way:
    """A preset, and the GPUs that hold one copy of the model together."""

    preset: str
    tp: int = 1

    def __str__(self) -> str:
        return f"tp {self.tp} x {self.preset}" if self.tp > 1 else self.preset


@dataclass(frozen=True)
class ScalePoint:
    """One way on a number of GPUs. `efficiency` is what the kernels of the model take on one GPU, without engine, links
    and slower GPUs, over what the step takes."""

    way: str
    gpus: int
    time: StepTime
    efficiency: float
    peak_bytes: int
    fits: bool

    @property
    def exposed(self) -> float:
        """The part of the step in which computation waits for communication."""
        return self.time.exposed_s / self.time.step_s


@dataclass(frozen=True)
class Scaling:
    """All ways on all numbers of GPUs."""

    model: ModelSpec
    workload: Workload
    gpu_bytes: int
    points: list[ScalePoint]
    global_batch: int | None = None

    @property
    def ways(self) -> list[str]:
        """Presets, then tensor parallelism, as at the largest number of GPUs."""
        return list(dict.fromkeys(point.way for gpus in reversed(self.counts) for point in self.of(gpus)))

    def of(self, gpus: int) -> list[ScalePoint]:
        return [point for point in self.points if point.gpus == gpus]

    @property
    def counts(self) -> list[int]:
        return sorted({point.gpus for point in self.points})

    def at(self, way: str, gpus: int) -> ScalePoint | None:
        """None where there are fewer samples than copies of the model."""
        return next((point for point in self.of(gpus) if point.way == way), None)

    def best(self, gpus: int) -> ScalePoint | None:
        """The fastest that fits."""
        fitting = [point for point in self.of(gpus) if point.fits]
        return max(fitting, key=lambda point: point.time.tokens_per_s or 0.0, default=None)

    def stops_paying(self, way: str) -> int | None:
        """The number of GPUs from which a way waits for communication for too long; None if it never does."""
        found = [point.gpus for point in self.points if point.way == way and point.exposed > STOPS_PAYING]
        return min(found, default=None)


def gpu_counts(text: str) -> list[int]:
    """Doubling from the first to the last: 8..64 is 8, 16, 32, 64."""
    first, _, last = text.partition("..")
    try:
        low, high = int(first), int(last)
    except ValueError:
        raise ConfigError(f"--gpus {text}: expected a number, or a range such as 8..1024") from None
    if not 1 <= low <= high:
        raise ConfigError(f"--gpus {text}: a range goes from at least 1 to a number that is no smaller")
    counts = [low << power for power in range((high // low).bit_length())]
    return [count for count in counts if count <= high]


def scale(
    model: ModelSpec,
    workload: Workload,
    counts: Sequence[int],
    on: Hardware,
    device: DeviceTimes | None = None,
    global_batch: int | None = None,
) -> Scaling:
    """Every way on each number of GPUs, 8 to a node."""
    ways = [Way(preset) for preset in ("zero1", "zero2", "zero3", "zero3_hybrid")]
    with contextlib.suppress(ConfigError):  # it cannot be cut into as many parts
        model.part(PER_NODE)
        ways += [Way("zero1", PER_NODE), Way("zero3", PER_NODE)]
    points = []
    for gpus in counts:
        nodes = max(1, gpus // PER_NODE)
        if gpus % nodes:
            raise ConfigError(f"--gpus {gpus}: not a multiple of {PER_NODE}, the GPUs of a node")
        hardware = replace(on, gpus=gpus, nodes=nodes)
        points += [p for way in ways if (p := _point(model, workload, hardware, way, device, global_batch))]
    return Scaling(model, workload, on.gpu_bytes, points, global_batch)


def _point(
    model: ModelSpec,
    workload: Workload,
    on: Hardware,
    way: Way,
    device: DeviceTimes | None,
    global_batch: int | None,
) -> ScalePoint | None:
    if on.gpus % way.tp or (on.nodes == 1 and way.preset == "zero3_hybrid"):
        return None
    step = replace(workload, tp=way.tp)
    if global_batch is not None:
        each = global_batch // (step.micro_batch * on.zero_shape(step.tp).world_size)
        if not each:
            return None
        step = replace(step, accumulation=each)
    times, shape, config = device_times(on, device), on.zero_shape(step.tp), step.config(way.preset)
    found = step_time(sketched(model, step, config, shape, times), model, step, times)
    alone = computing_s(model, replace(step, tp=1), replace(times, ranks=1)) / way.tp
    held = model.part(way.tp)
    estimated = estimate(held, step, config, shape)
    peak = estimated.peak_bytes + on.reserved_bytes
    return ScalePoint(
        way=str(way),
        gpus=on.gpus,
        time=found,
        efficiency=alone / found.step_s,
        peak_bytes=peak,
        fits=judge(config, peak, estimated.tiers, on).fits,
    )


def render(found: Scaling) -> RenderableType:
    """Efficiency and peak of every way against GPUs, the fastest that fits, and where each stops paying."""
    table = plain_table("GPUs", *found.ways, "fastest that fits", left=("fastest that fits",))
    for gpus in found.counts:
        best, fastest = found.best(gpus), "nothing fits"
        if best is not None:
            fastest = f"{best.time.step_s:.3g} s, {best.time.tokens_per_s or 0:,.0f} tok/s a GPU"
        table.add_row(str(gpus), *(_cell(found.at(way, gpus), best) for way in found.ways), fastest)
    model, step = found.model, found.workload
    batch = f"{found.global_batch} samples a step" if found.global_batch else f"{step.micro_batch} a GPU"
    title = f"{model.name}, {step.sequence} tokens, {batch}, {PER_NODE} GPUs a node"
    legend = (
        "Efficiency: the kernels of the model alone over the step; peak GB of a GPU by arithmetic (!: does not fit)\n"
    )
    lines = [Text(title, style="bold"), Text(f"({found.points[0].time.source})"), Text(legend)]
    return Group(*lines, table, Text(), *map(Text, _endings(found)))


def _cell(point: ScalePoint | None, best: ScalePoint | None) -> str:
    if point is None:
        return "-"
    text = f"{point.efficiency:.0%} {point.peak_bytes / 1e9:.0f}{'' if point.fits else '!'}"
    return f"[bold]{text}[/]" if point is best else text


def _endings(found: Scaling) -> list[str]:
    lines = []
    for way in found.ways:
        fits = [point.gpus for point in found.points if point.way == way and point.fits]
        stops = found.stops_paying(way)
        fit = f"fits from {min(fits)} GPUs" if fits else "does not fit"
        waits = f"from {stops} on" if stops else "never"
        lines.append(f"{way}: {fit}; more than {STOPS_PAYING:.0%} of a step waits for communication: {waits}")
    return lines
