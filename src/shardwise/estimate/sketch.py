"""The order of a step without a dry run: what the engine issues for units of known sizes, written on a tape.

Units are computed and sent whole, as the engine does. The kernels of their passes are matrix products, attention, and a
few passes over the activations. `tests/planning/test_planning_seconds.py` holds it to the tape of a dry run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from shardwise.comm.interface import EVERYWHERE
from shardwise.config import Config
from shardwise.config.costs import DTYPE_BYTES, gradient_bytes, offloaded_bytes_each, resting, weight_bytes
from shardwise.config.shape import AXES, Axis, NodeShape, axes_between
from shardwise.estimate.estimate import UNKNOWN_LAYERS
from shardwise.estimate.passes import layer_kept_bytes
from shardwise.memory.reduce_plan import sum_block_numel
from shardwise.models.dimensions import Dimensions
from shardwise.models.workload import ModelSpec, Workload
from shardwise.partition.policy import policy_for
from shardwise.timing.forms import Form
from shardwise.timing.tape import Mark, Tape
from shardwise.timing.timeline import COMPUTE

_PASSES_OVER_ACTIVATIONS = 2.4
"""How often a forward reads or writes what it keeps for the backward, apart from matrix products."""
_LOGIT_BYTES_FORWARD, _LOGIT_BYTES_BACKWARD = 18, 26
_FP32 = 4
_FORWARD, _BACKWARD, _UPDATE = 25, 45, 12
"""About how many operators the host issues for a unit's passes and for its update."""
_UPDATE_BYTES = 30
"""What an update of Adam reads and writes for an element: gradient, master and moments, and a 16-bit copy."""


class SketchUnit(NamedTuple):
    """A unit: its parameters on this rank, those that are trained, and the kernels of its passes."""

    numel: int
    trained: int
    forward: dict[Form, float]
    backward: dict[Form, float]
    tp_sends: int = 0
    tp_bytes: int = 0


def sketch_units(model: ModelSpec, workload: Workload, layers: int | None = None) -> list[SketchUnit]:
    """The units of a model in forward order; of its layers, only the last `layers`."""
    if model.dimensions is None:
        return _equal_units(model, workload)
    of = model.dimensions.part(workload.tp)
    is_frozen = bool(model.frozen)
    adapters = model.trainable // of.layers if is_frozen else 0
    units = [_embedding(of, workload, is_frozen)]
    for index in range(of.layers)[-layers if layers else None :]:
        numel = of.layer_numel(index) + adapters
        units.append(_layer(of, index, numel, adapters if is_frozen else numel, workload))
    units.append(_head(of, workload, is_frozen))
    return units


def _embedding(of: Dimensions, workload: Workload, is_frozen: bool) -> SketchUnit:
    item = DTYPE_BYTES[workload.precision]
    numel = of.embedding_numel + of.positions * of.hidden
    rows = plain(2 * workload.tokens * of.hidden * item)
    backward = {} if is_frozen else {rows: 1.0, plain(numel * item): 1.0}
    return SketchUnit(numel, 0 if is_frozen else numel, {rows: 1.0}, backward)


def _layer(of: Dimensions, index: int, numel: int, trained: int, workload: Workload) -> SketchUnit:
    item, tokens, dtype = DTYPE_BYTES[workload.precision], workload.tokens, workload.precision
    forward = _products(of, index, tokens, dtype)
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


def _products(of: Dimensions, index: int, tokens: int, dtype: str) -> dict[Form, float]:
    """The matrix products of a layer. In a layer with experts, each token passes those that it uses, and the shared
    one, instead of the plain MLP."""
    found: defaultdict[Form, float] = defaultdict(float)
    experts = of.experts if of.experts is not None and index >= of.experts.dense_layers else None
    for name, (inputs, outputs) in of.linears().items():
        if experts is None or not name.startswith(("up", "gate", "down")):
            found[product(dtype, tokens, outputs, inputs)] += 1
    if experts is not None:
        each, matrices = max(1, tokens * experts.used // experts.count), 2 + of.gated
        found[product(dtype, each, experts.width, of.hidden)] += matrices * experts.count
        if experts.shared_width:
            found[product(dtype, tokens, experts.shared_width, of.hidden)] += matrices
    return dict(found)


def _head(of: Dimensions, workload: Workload, is_frozen: bool) -> SketchUnit:
    numel = (0 if of.tied else of.embedding_numel) + of.hidden
    form = product(workload.precision, workload.tokens, of.vocabulary, of.hidden)
    logits = workload.tokens * of.vocabulary
    forward = {form: 1.0, plain(logits * _LOGIT_BYTES_FORWARD / 4): 4.0}
    backward = {form: 1.0 if is_frozen else 2.0, plain(logits * _LOGIT_BYTES_BACKWARD / 4): 4.0}
    return SketchUnit(numel, 0 if is_frozen else numel, forward, backward)


def _equal_units(model: ModelSpec, workload: Workload) -> list[SketchUnit]:
    """The units of a model of which only the size is known: equal ones, with square matrices."""
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


def plain(size_bytes: float) -> Form:
    """Any kernel that reads and writes `size_bytes`."""
    return Form("bytes", "fp32", 0, int(size_bytes))


class Sketch:
    """The steps of one rank."""

    def __init__(self, units: Sequence[SketchUnit], config: Config, shape: NodeShape, tp: int, resident: float) -> None:
        self.tape = Tape()
        self._units, self._config, self._shape, self._tp = units, config.for_shape(shape), shape, tp
        placement = self._config.placement
        self._weights, self._grads, self._optim = placement.weights, placement.grads, placement.optim
        self._weight_bytes, self._count = weight_bytes(config), config.batch.accumulation
        self._sum_bytes = gradient_bytes(config)
        self._policy = policy_for(self._config, True, torch.float32)
        self._away = offloaded_bytes_each(resting(self._config)) * (1 - resident)
        self._resident = resident
        self._disk = self._optim.tier == "disk"
        self._new: dict[int, Mark | None] = {}
        self._gathered: dict[int, Mark | None] = {}
        self._pending: set[int] = set()

    def run(self) -> Tape:
        """Two steps, of which the second counts."""
        self.tape.is_recording = True
        for number in range(2):
            if number:
                self.tape.begin_step()
            for micro in range(self._count):
                self._forward()
                self._backward(is_last=micro == self._count - 1)
            self._update()
        self.tape.end()
        return self.tape

    # Passes

    def _forward(self) -> None:
        last = len(self._units) - 1
        for index, unit in enumerate(self._units):
            self._gather(index, index + 1)
            _wait(self._new.pop(index, None))
            self._compute(unit.forward, unit, unit.tp_sends, _FORWARD)
            if index < last:
                self._gathered.pop(index, None)

    def _backward(self, is_last: bool) -> None:
        reduces = is_last or self._grads.sharding != "replicated"
        in_flight: tuple[SketchUnit, Mark | None] | None = None
        for index in reversed(range(len(self._units))):
            unit = self._units[index]
            self._gather(index, index - 1)
            recomputes = self._config.checkpointing.enabled
            self._compute(unit.backward, unit, (1 + recomputes) * unit.tp_sends, _BACKWARD + recomputes * _FORWARD)
            self._gathered.pop(index, None)
            if not unit.trained:
                continue
            self._finish(in_flight)
            in_flight = None
            if reduces:
                self.tape.note({plain(2 * unit.trained * self._weight_bytes): 1.0})
                in_flight = unit, self._reduce(unit, is_last)
            else:
                self.tape.note({plain(unit.trained * (self._weight_bytes + 2 * _FP32)): 1.0})
        self._finish(in_flight)

    def _compute(self, kernels: dict[Form, float], unit: SketchUnit, sends: int, issues: int) -> None:
        """Tensor parallelism adds up after each half of a layer, and computation waits for it."""
        parts = sends or 1
        for _ in range(parts):
            self.tape.note({form: count / parts for form, count in kernels.items()}, issues / parts)
            if sends:
                _wait(self.tape.send("tp", "tp", 2 * unit.tp_bytes, self._tp, "inner"))

    # Weights

    def _gather(self, index: int, ahead: int) -> None:
        if self._weights.sharding == "replicated":
            return
        for each in (index, ahead):
            if 0 <= each < len(self._units) and each not in self._gathered:
                self._gathered[each] = self._start_gather(each)
        _wait(self._gathered[index])

    def _start_gather(self, index: int) -> Mark | None:
        unit, arrived = self._units[index], None
        if index in self._pending:
            self._pending.remove(index)
            arrived = self._carry(unit)
        elif self._weights.tier != "device":
            arrived = self._bring(unit, self._owned(unit.numel) * _FP32 * (1 - self._resident))
        arrived = arrived or self._new.pop(index, None)
        part = unit.numel // self._shape.parts(self._weights.sharding)
        self.tape.note({plain(part * (_FP32 + self._weight_bytes)): 1.0})  # cast from the master
        return self._spread(unit, AXES[self._weights.sharding], after=arrived)

    def _spread(
        self, unit: SketchUnit, axes: Sequence[Axis], divided: int = 1, after: Mark | None = None
    ) -> Mark | None:
        """A gather over axes, the outer one first, after something else."""
        size_bytes, done = unit.numel * self._weight_bytes // divided, after
        for axis in reversed(axes):
            inside = [other for other in EVERYWHERE[: EVERYWHERE.index(axis)] if other in axes]
            part = size_bytes
            for other in inside:
                part //= self._shape.size(other)
            done = self._send("gather", "gather", part, axis, done) or done
        return done

    # Gradients

    def _reduce(self, unit: SketchUnit, is_last: bool) -> Mark | None:
        numel, done = unit.trained, None
        for axis in EVERYWHERE:
            if axis == "outer" and not is_last and "outer" not in AXES[self._grads.sharding]:
                continue  # added up in the node until the last micro-batch
            done = self._send("reduce", "reduce", numel * self._policy.wire_dtype(axis).itemsize, axis, done) or done
            numel //= self._shape.size(axis)
        return done

    def _finish(self, reducing: tuple[SketchUnit, Mark | None] | None) -> None:
        if reducing is None:
            return
        unit, sent = reducing
        _wait(sent)
        owned, part = self._owned(unit.trained), unit.trained
        for axis in (axis for axis in EVERYWHERE if self._shape.size(axis) > 1):
            rows = self._shape.size(axis)
            part //= rows
            blocks = -(-part // sum_block_numel(part, "cuda")) or 1
            added = plain(part * (rows * (self._policy.wire_dtype(axis).itemsize + 2 * _FP32) + 14) / blocks)
            self.tape.note({added: blocks}, blocks * (rows + 3))
        if self._grads.tier != "device" and self._away:
            self._down(owned * self._sum_bytes * (1 - self._resident))

    # The update

    def _update(self) -> None:
        trained = [index for index, unit in enumerate(self._units) if unit.trained]
        self.tape.note({plain(sum(self._owned(self._units[index].trained) * _FP32 for index in trained)): 1.0})
        if self._shape.world_size > 1:
            axis: Axis = "outer" if self._shape.nodes > 1 else "inner"
            _wait(self.tape.send("reduce", "share", 8 * self._shape.world_size, self._shape.world_size, axis))
        for index in trained:
            self._update_unit(index)

    def _update_unit(self, index: int) -> None:
        unit = self._units[index]
        if self._away and self._weights.sharding != "replicated" and self._weights.tier != "device":
            self._pending.add(index)  # with the next gather
            return
        arrived = None
        if self._away:
            arrived = self._carry(unit)
        else:
            self.tape.note({plain(self._owned(unit.trained) * _UPDATE_BYTES): 1.0}, _UPDATE)
        axes = axes_between(self._optim.sharding, self._weights.sharding)
        if axes:
            self._new[index] = self._spread(unit, axes, self._shape.parts(self._weights.sharding), arrived)
        else:
            self._new[index] = arrived

    def _carry(self, unit: SketchUnit) -> Mark:
        """Copy states to the device, update them, and copy them back."""
        owned = self._owned(unit.trained)
        moved = owned * self._away
        up = self._bring(unit, moved)
        with self.tape.on("update"):
            _wait(up)
            self.tape.note({plain(owned * _UPDATE_BYTES): 1.0}, _UPDATE)
            updated = self.tape.mark()
        with self.tape.on("d2h"):
            updated.wait()
        kept = owned * self._sum_bytes if self._grads.tier != "device" else 0
        self._down(max(0.0, moved - kept * (1 - self._resident)), "d2h")
        return updated

    def _bring(self, unit: SketchUnit, size_bytes: float) -> Mark:
        """Copy states up, not before the engine reaches this unit: the buffers for units ahead are bounded."""
        here = self.tape.mark(COMPUTE)
        for stream in ("h2d", "disk") if self._disk else ("h2d",):
            with self.tape.on(stream):
                here.wait()
        if self._disk:
            with self.tape.on("disk"):
                self.tape.copy("disk", int(size_bytes))
                read = self.tape.mark()
            with self.tape.on("h2d"):
                read.wait()
        with self.tape.on("h2d"):
            self.tape.copy("up", int(size_bytes))
            return self.tape.mark()

    def _down(self, size_bytes: float, after: str = "") -> None:
        made = self.tape.mark()
        with self.tape.on("d2h"):
            if not after:
                made.wait()
            self.tape.copy("down", int(size_bytes))
            stored = self.tape.mark()
        if self._disk and after:
            with self.tape.on("disk"):
                stored.wait()
                self.tape.copy("disk", int(size_bytes))

    def _owned(self, numel: int) -> int:
        return numel // self._shape.parts(self._optim.sharding)

    def _send(self, channel: str, what: str, size_bytes: int, axis: Axis, after: Mark | None) -> Mark | None:
        ranks = self._shape.size(axis)
        if ranks < 2:
            return None
        return self.tape.send(channel, what, size_bytes, ranks, axis, after)


def _wait(mark: Mark | None) -> None:
    if mark is not None:
        mark.wait()
