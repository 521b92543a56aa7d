"""Seconds of a step: the tape of a dry run, or a sketch of one, priced for a device and run as a timeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.config import Config
from shardwise.config.costs import DTYPE_BYTES
from shardwise.config.shape import NodeShape
from shardwise.dry_run.dry_run import MOST_MICRO_BATCHES, Foreseen
from shardwise.errors import ConfigError
from shardwise.estimate.arithmetic import operations
from shardwise.estimate.estimate import UNKNOWN_LAYERS
from shardwise.estimate.hardware import Hardware
from shardwise.estimate.passes import layer_kept_bytes
from shardwise.estimate.sketch import Sketch, SketchUnit, plain
from shardwise.models.dimensions import Dimensions
from shardwise.models.workload import ModelSpec, Workload
from shardwise.timing.device import DeviceTimes, published, reaching
from shardwise.timing.forms import Form
from shardwise.timing.tape import Issued, priced
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
"""Of models with more layers, so many are run; further ones add what the difference of these two does."""
_PASSES_OVER_ACTIVATIONS = 2.4
"""How often a forward reads or writes what it keeps for the backward, apart from matrix products."""
_LOGIT_BYTES_FORWARD, _LOGIT_BYTES_BACKWARD = 18, 26


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


def device_for(on: Hardware, device: DeviceTimes | None = None) -> DeviceTimes:
    """The device's times, with what is given of the machine's rates in place of its own."""
    found, rates = device or published(DEFAULT_DEVICE), on.rates
    each = on.gpus // on.nodes
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

    def of(micro_batches: int, fewer: int = layers) -> Timeline:
        batch = config.batch.model_copy(update={"accumulation": micro_batches})
        units = sketch_units(model, workload, fewer)
        tape = Sketch(units, config.model_copy(update={"batch": batch}), shape, workload.tp, resident).run()
        return recorded(tape.entries, tape.start, device)

    def of_layers(micro_batches: int) -> Timeline:
        if layers <= _MANY[1]:
            return of(micro_batches)
        few, more = (of(micro_batches, each) for each in _MANY)
        return _further(few, more, (layers - _MANY[1]) / (_MANY[1] - _MANY[0]))

    if count <= MOST_MICRO_BATCHES:
        return of_layers(count)
    before, last = of_layers(MOST_MICRO_BATCHES - 1), of_layers(MOST_MICRO_BATCHES)
    return _further(before, last, count - MOST_MICRO_BATCHES)


def computing_s(model: ModelSpec, workload: Workload, device: DeviceTimes) -> float:
    """What the kernels of the model's passes take in a step, one after the other."""
    units = sketch_units(model, workload)
    each = [device.kernels_s(unit.forward) + device.kernels_s(unit.backward) for unit in units]
    return workload.accumulation * sum(each)


def recorded(issued: Sequence[Issued], last_step: int, device: DeviceTimes) -> Timeline:
    """A step as a dry run issued it."""
    return run(priced(issued, last_step, device))


def step_time(timeline: Timeline, model: ModelSpec, workload: Workload, device: DeviceTimes) -> StepTime:
    """What there is to say of a step."""
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
    foreseen: Foreseen | None = None,
) -> StepTime | None:
    """The step of one preset: by the tape of its dry run, or by a sketch; None where neither is to be had."""
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
    """The same for more micro-batches than a dry run ran."""
    busy, waits = ({key: factor * each for key, each in part.items()} for part in (timeline.busy_s, timeline.waits_s))
    return Timeline(factor * timeline.step_s, busy, waits)


def _further(before: Timeline, last: Timeline, times: float) -> Timeline:
    """The last timeline, and so many times more what it has more than the one before."""

    def more(name: str) -> dict[str, float]:
        low, high = getattr(before, name), getattr(last, name)
        return {key: high[key] + times * max(0.0, high[key] - low.get(key, 0.0)) for key in high}

    step_s = last.step_s + times * (last.step_s - before.step_s)
    return Timeline(step_s, more("busy_s"), more("waits_s"))


# Units


def sketch_units(model: ModelSpec, workload: Workload, layers: int | None = None) -> list[SketchUnit]:
    """The units of a model in forward order; of its layers, only the last `layers`."""
    if model.dimensions is None:
        return _equal_units(model, workload)
    of = model.dimensions.part(workload.tp)
    item, tokens = DTYPE_BYTES[workload.precision], workload.tokens
    adapters = model.trainable / of.layers if model.frozen else 0.0
    units = [_embedding(of, tokens, item, bool(model.frozen))]
    for index in range(of.layers)[-layers if layers else None :]:
        numel = of.layer_numel(index) + int(adapters)
        units.append(_layer(of, index, numel, int(adapters) if model.frozen else numel, workload))
    units.append(_head(of, tokens, item, workload, bool(model.frozen)))
    return units


def _embedding(of: Dimensions, tokens: int, item: int, is_frozen: bool) -> SketchUnit:
    numel = of.embedding_numel + of.positions * of.hidden
    rows = plain(2 * tokens * of.hidden * item)
    backward = {} if is_frozen else {rows: 1.0, plain(numel * item): 1.0}
    return SketchUnit(numel, 0 if is_frozen else numel, {rows: 1.0}, backward)


def _layer(of: Dimensions, index: int, numel: int, trained: int, workload: Workload) -> SketchUnit:
    item, tokens, dtype = DTYPE_BYTES[workload.precision], workload.tokens, workload.precision
    forward: dict[Form, float] = {}
    for inputs, outputs in of.linears().values():
        form = product(dtype, tokens, outputs, inputs)
        forward[form] = forward.get(form, 0.0) + 1
    if of.experts is not None and index >= of.experts.dense_layers:
        forward = _with_experts(of, forward, tokens, dtype)
    width = of.heads * of.head_dim
    attention = 4 * tokens * workload.sequence * width
    forward[Form("attention", dtype, attention, 4 * tokens * width * item)] = 1.0
    activations = _PASSES_OVER_ACTIVATIONS * layer_kept_bytes(of, workload, index)
    forward[plain(activations / 16)] = 16.0
    passes = 2.0 if trained == numel else 1.0
    backward = {form: passes * count for form, count in forward.items() if form.product}
    backward[Form("attention backward", dtype, attention * 5 // 2, 8 * tokens * width * item)] = 1.0
    backward[plain(activations / 8)] = 16.0
    if workload.checkpointing:
        for form, count in forward.items():
            backward[form] = backward.get(form, 0.0) + count
    sends = 2 if workload.tp > 1 else 0
    return SketchUnit(numel, trained, forward, backward, sends, tokens * of.hidden * item)


def _with_experts(of: Dimensions, forward: dict[Form, float], tokens: int, dtype: str) -> dict[Form, float]:
    """Each token passes the experts that it uses, and the shared ones, instead of the plain MLP."""
    experts = of.experts
    assert experts is not None
    made: dict[Form, float] = {}
    for name, (inputs, outputs) in of.linears().items():
        if not name.startswith(("up", "gate", "down")):
            form = product(dtype, tokens, outputs, inputs)
            made[form] = made.get(form, 0.0) + 1
    each = max(1, tokens * experts.used // experts.count)
    matrices = 2 + of.gated
    for rows, width, count in ((each, experts.width, experts.count), (tokens, experts.shared_width, 1)):
        if width:
            form = product(dtype, rows, width, of.hidden)
            made[form] = made.get(form, 0.0) + matrices * count
    return made


def _head(of: Dimensions, tokens: int, item: int, workload: Workload, is_frozen: bool) -> SketchUnit:
    numel = (0 if of.tied else of.embedding_numel) + of.hidden
    form = product(workload.precision, tokens, of.vocabulary, of.hidden)
    logits = tokens * of.vocabulary
    forward = {form: 1.0, plain(logits * _LOGIT_BYTES_FORWARD / 4): 4.0}
    backward = {form: 1.0 if is_frozen else 2.0, plain(logits * _LOGIT_BYTES_BACKWARD / 4): 4.0}
    return SketchUnit(numel, 0 if is_frozen else numel, forward, backward)


def _equal_units(model: ModelSpec, workload: Workload) -> list[SketchUnit]:
    """Of a model of which only the size is known: equal units, square matrices."""
    numel = model.parameters // UNKNOWN_LAYERS
    side = max(1, math.isqrt(numel // 12))
    form = Form(
        "product",
        workload.precision,
        2 * numel * workload.tokens,
        DTYPE_BYTES[workload.precision] * numel,
        (workload.tokens, side, side, 1),
    )
    backward = {form: 2.0 + workload.checkpointing}
    trained = model.trainable // UNKNOWN_LAYERS
    return [SketchUnit(numel, trained, {form: 1.0}, backward)] * UNKNOWN_LAYERS


def product(dtype: str, rows: int, columns: int, depth: int) -> Form:
    """A matrix product."""
    moved = DTYPE_BYTES[dtype] * (rows * depth + depth * columns + rows * columns)
    return Form("product", dtype, 2 * rows * columns * depth, moved, (rows, columns, depth, 1))


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
