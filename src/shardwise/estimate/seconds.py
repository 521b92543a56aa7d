"""Seconds of a step: the tape of a dry run, or a sketch of one, priced for a device and run as a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.config import Config
from shardwise.config.shape import NodeShape
from shardwise.dry_run.dry_run import MOST_MICRO_BATCHES, Foreseen
from shardwise.errors import ConfigError
from shardwise.estimate.arithmetic import operations
from shardwise.estimate.hardware import Hardware
from shardwise.estimate.sketch import Sketch, sketch_units
from shardwise.models.workload import ModelSpec, Workload
from shardwise.timing.device import DeviceTimes, published, reaching
from shardwise.timing.tape import Issued
from shardwise.timing.timeline import MOVING, Timeline, run

DEFAULT_DEVICE = "h100"
BOUNDS = {
    "compute": "computation",
    "link": "link in the node",
    "network": "network",
    "up": "PCIe, up",
    "down": "PCIe, down",
    "disk": "disk",
    "host": "host (issues kernels)",
    "update": "updates",
}
_MANY = (12, 16)
"""Deeper models are run with these two numbers of layers, and extrapolated from the difference."""


@dataclass(frozen=True)
class StepTime:
    """What a step takes.

    tokens_per_s  of one GPU; None for a model whose tokens are not known
    mfu           the operations of the model, without what is computed twice, over what the device could do; None where
                  its peak is not known
    exposed_s     in which computation waits for communication
    moving_s      in which it waits for states between device, host and disk
    bound_by      the resource that is in use for the largest part of the step
    source        where the times of kernels and links come from
    """

    step_s: float
    tokens_per_s: float | None
    mfu: float | None
    exposed_s: float
    moving_s: float
    bound_by: str
    source: str

    def dollars_per_billion_tokens(self, price: float) -> float | None:
        """At `price` dollars an hour for a GPU."""
        return price / 3600 / self.tokens_per_s * 1e9 if self.tokens_per_s else None


def device_times(on: Hardware, device: DeviceTimes | None = None) -> DeviceTimes:
    """The device's times, with what is given of the machine's rates in place of its own."""
    found, rates = device or published(DEFAULT_DEVICE), on.rates
    each = on.shape.per_node
    if rates.operations is not None:
        found = reaching(found, rates.operations)
    if rates.gpu_link is not None:
        found = replace(found, inner=found.inner._replace(rate=rates.gpu_link))
    if rates.node_link is not None:
        found = replace(found, outer=found.outer._replace(rate=rates.node_link / each))
    if rates.host_link is not None:
        found = replace(found, up=rates.host_link, down=rates.host_link)
    return replace(found, disk=(rates.disk or found.disk) / each, ranks=on.gpus)


def sketched(
    model: ModelSpec,
    workload: Workload,
    config: Config,
    shape: NodeShape,
    device: DeviceTimes,
    resident: float = 0.0,
) -> Timeline:
    """A step from sizes alone; `resident` of the states that may rest off the device stay on it."""
    count, layers = config.batch.accumulation, model.dimensions.layers if model.dimensions else 0

    def timeline(micro_batches: int, fewer: int = layers) -> Timeline:
        batch = config.batch.model_copy(update={"accumulation": micro_batches})
        units = sketch_units(model, workload, fewer)
        tape = Sketch(units, config.model_copy(update={"batch": batch}), shape, workload.tp, resident).run()
        return recorded(tape.entries, tape.start, device)

    def of_all_layers(micro_batches: int) -> Timeline:
        if layers <= _MANY[1]:
            return timeline(micro_batches)
        few, more = (timeline(micro_batches, each) for each in _MANY)
        return _further(few, more, (layers - _MANY[1]) / (_MANY[1] - _MANY[0]))

    if count <= MOST_MICRO_BATCHES:
        return of_all_layers(count)
    before, last = of_all_layers(MOST_MICRO_BATCHES - 1), of_all_layers(MOST_MICRO_BATCHES)
    return _further(before, last, count - MOST_MICRO_BATCHES)


def computing_s(model: ModelSpec, workload: Workload, device: DeviceTimes) -> float:
    """What the kernels of the model's passes take in a step, one after the other."""
    units = sketch_units(model, workload)
    each = [device.kernels_s(unit.forward) + device.kernels_s(unit.backward) for unit in units]
    return workload.accumulation * sum(each)


def recorded(issued: Sequence[Issued], last_step: int, device: DeviceTimes) -> Timeline:
    """A step as a dry run issued it."""
    return run(device.priced(issued, last_step))


def step_time(timeline: Timeline, model: ModelSpec, workload: Workload, device: DeviceTimes) -> StepTime:
    """The figures of a step, from its timeline."""
    step_s, has_tokens = timeline.step_s, model.build is None
    useful = operations(model, replace(workload, checkpointing=False)) / workload.tp
    peak = device.peak.get(workload.precision) if has_tokens else None
    return StepTime(
        step_s=step_s,
        tokens_per_s=workload.tokens * workload.accumulation / workload.tp / step_s if has_tokens else None,
        mfu=useful / step_s / peak if peak else None,
        exposed_s=timeline.exposed_s,
        moving_s=sum(timeline.waits_s.get(what, 0.0) for what in (*MOVING, "update")),
        bound_by=timeline.bound_by,
        source=device.source,
    )


def preset_time(
    preset: str,
    model: ModelSpec,
    workload: Workload,
    shape: NodeShape,
    device: DeviceTimes,
    foreseen: Foreseen | None,
) -> StepTime | None:
    """The step of one preset: by the tape of its dry run, or by a sketch; None if neither is possible."""
    config = workload.config(preset)
    if workload.pp > 1 or (foreseen is None and model.build is not None):
        return None
    if foreseen is None or not foreseen.issued:
        return step_time(sketched(model, workload, config, shape, device), model, workload, device)
    found = recorded(foreseen.issued, foreseen.last_step, device)
    ran = min(workload.accumulation, MOST_MICRO_BATCHES)
    if ran < workload.accumulation:
        found = scaled(found, workload.accumulation / ran)
    return step_time(found, model, workload, device)


def scaled(timeline: Timeline, factor: float) -> Timeline:
    """The timeline of `factor` times as many micro-batches."""
    busy, waits = ({key: factor * each for key, each in part.items()} for part in (timeline.busy_s, timeline.waits_s))
    return Timeline(factor * timeline.step_s, busy, waits)


def _further(before: Timeline, last: Timeline, times: float) -> Timeline:
    """The last timeline, extended by `times` its difference from the one before."""

    def more(name: str) -> dict[str, float]:
        low, high = getattr(before, name), getattr(last, name)
        return {key: high[key] + times * max(0.0, high[key] - low.get(key, 0.0)) for key in high}

    step_s = last.step_s + times * (last.step_s - before.step_s)
    return Timeline(step_s, more("busy_s"), more("waits_s"))


def fitted(device: DeviceTimes, step_s: float, issued: Sequence[Issued], last_step: int, named: str) -> DeviceTimes:
    """The device with all kernels slower, or faster, by the factor with which this step takes `step_s`: a calibration
    on one measured step."""
    factor = device.slowdown
    for _ in range(12):
        found = recorded(issued, last_step, replace(device, slowdown=factor)).step_s
        if abs(found / step_s - 1) < 1e-4:
            return replace(device, slowdown=factor, source=f"{device.name}, calibrated on {named}")
        factor *= step_s / found
    raise ConfigError(f"no speed of computation makes this step take {step_s:.4g} s: something else bounds it")
