"""The analytic mode: the peak of a rank from sizes alone.

It follows the engine through one step, unit by unit, and takes the highest use of memory. What it adds up comes from
where the engine has it: the units, their layouts and what may be in flight from `plan_units`, the course of gradients
from `reduce_plan`, bytes at rest from `costs`. What a decoder's layers allocate comes from `passes`.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import nn

from shardwise.config import Config
from shardwise.config.costs import moment_bytes
from shardwise.config.optimizers import optimizer_class
from shardwise.config.shape import NodeShape, shape_of
from shardwise.dry_run.comm import DryComm
from shardwise.dry_run.dry_run import CATEGORIES, Estimate
from shardwise.dry_run.kernels import CUBLAS_BYTES
from shardwise.engine.assembly import plan_units
from shardwise.engine.residency import Budget, offloaded_bytes
from shardwise.estimate.passes import Passes, Snapshot, decoder_passes, meta_decoder
from shardwise.memory.ledger import Ledger
from shardwise.memory.reduce_plan import (
    GradSizes,
    GradUse,
    ReducePlan,
    replicated_uses,
    sharded_uses,
    update_batches,
)
from shardwise.models.workload import Lora, ModelSpec, Workload
from shardwise.offload.context import OffloadContext
from shardwise.offload.offloaded_states import TRANSFER_BUFFERS
from shardwise.offload.streams import FREED_LATER
from shardwise.unit.plan import UnitPlan

UNKNOWN_LAYERS = 32
"""A model of which only the size is known is cut into this many units."""
_ALONE = ReducePlan(parts=2, overlap=False)
"""One rank sends nothing: gradients are copied to where they are held."""


def estimate(model: ModelSpec, workload: Workload, config: Config, ranks: int | NodeShape) -> Estimate:
    """The peak of one rank under a configuration. Under tensor parallelism, `model` is its part (`ModelSpec.part`)."""
    shape = shape_of(ranks)
    step = _Step(model, workload, config.for_shape(shape), shape)
    highest = step.highest() | {"overhead": CUBLAS_BYTES}
    return Estimate({name: highest.get(name, 0) for name in CATEGORIES}, step.tiers)


@dataclass(frozen=True)
class Units:
    """The units of a model in the order of their first use, and the bytes of the optimizer's moments per element."""

    plans: tuple[UnitPlan, ...]
    comm: DryComm
    moment_bytes: int

    @cached_property
    def resting(self) -> Counter[str]:
        """Bytes on the device of one rank by kind, without gradients, which come and go: no step holds less."""
        sizes: Counter[str] = Counter()
        for unit in self.plans:
            for part in unit.policy.resting(self.moment_bytes):
                if part.tier == "device" and part.kind != "grads":
                    sizes[part.kind] += int(part.rank_bytes(unit.layout.numel, self.comm.shape))
        return sizes

    @cached_property
    def tiers(self) -> dict[str, int]:
        """What rests off the device."""
        sizes = sum((offloaded_bytes(unit, self.moment_bytes) for unit in self.plans), Counter[str]())
        return {tier: size for tier in ("host", "disk") if (size := sizes[tier])}

    @property
    def away_bytes(self) -> list[int]:
        """What of each unit's states rests off the device, in forward order; nothing of what is frozen."""
        return [offloaded_bytes(unit, self.moment_bytes).total() for unit in self.plans if unit.policy.trainable]


def units_of(model: ModelSpec, workload: Workload, config: Config, ranks: int | NodeShape) -> Units:
    """The units that the engine would make."""
    shape = shape_of(ranks)
    config = config.for_shape(shape)
    # Of the step, only whether several micro-batches are added up has a part in it.
    batch = {"accumulation": min(config.batch.accumulation, 2), "micro_batch_size": 1, "global_batch_size": None}
    alike = config.model_copy(
        update={"batch": config.batch.model_copy(update=batch), "checkpointing": type(config.checkpointing)()}
    )
    return _units(alike, model, workload.lora, shape)


@lru_cache(maxsize=512)
def _units(config: Config, model: ModelSpec, lora: Lora | None, shape: NodeShape) -> Units:
    comm = DryComm(min(2, shape.world_size - 1), shape, "cuda")
    module = _module(model, lora)
    optimizer = _optimizer(module, config)
    with _unlogged():
        plans = plan_units(module, optimizer, config, comm, Budget(config.offload, comm, Ledger()))
    return Units(tuple(plans), comm, moment_bytes(config))


def _optimizer(module: nn.Module, config: Config) -> torch.optim.Optimizer:
    """What the division into units asks of an optimizer: its class, options and parameters. It is not constructed: the
    constructor imports torch's compiler, which takes as long as the rest of a plan."""
    section = config.optimizer
    kind, options = (optimizer_class(section.name), section.params) if section else (torch.optim.AdamW, {})
    found = kind.__new__(kind)
    found.defaults = dict(options)
    found.param_groups = [{"params": [param for param in module.parameters() if param.requires_grad], **options}]
    return found


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Without the warnings that a run logs: a plan makes the units of every preset."""
    logger = logging.getLogger("shardwise")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


@lru_cache(maxsize=16)
def _module(model: ModelSpec, lora: Lora | None) -> nn.Module:
    if model.dimensions is not None:
        return meta_decoder(model.dimensions, lora)
    count = min(UNKNOWN_LAYERS, model.parameters)
    return nn.Sequential(*(_SizedBlock(model.trainable // count, model.frozen // count) for _ in range(count)))


class _SizedBlock(nn.Module):
    """A unit of which only the size is known."""

    def __init__(self, trained: int, frozen: int) -> None:
        super().__init__()
        for name, numel in (("trained", trained), ("frozen", frozen)):
            if numel:
                param = nn.Parameter(torch.empty(numel, device="meta"), requires_grad=name == "trained")
                self.register_parameter(name, param)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class _Use(NamedTuple):
    """Bytes in use at one time, in addition to what rests."""

    weights: int = 0
    grads: int = 0
    in_flight: int = 0
    activations: int = 0
    logits: int = 0


class _Step:
    """What one rank uses in the course of a step.

    Parts and units are numbered in forward order: `place` is the number of a part, `at` that of a unit.
    """

    def __init__(self, model: ModelSpec, workload: Workload, config: Config, shape: NodeShape) -> None:
        found = units_of(model, workload, config, shape)
        self._units, self._resting = found.plans, found.resting
        self.tiers = found.tiers
        self._accumulates = config.batch.accumulation > 1
        self._parts = list(_parts_of(model, workload, self._units))
        self._gathered = [
            unit.full_bytes - unit.moved_bytes if unit.policy.weights_sharded else 0 for unit in self._units
        ]
        used = {at: place for place, part in enumerate(self._parts) for at in part.units}
        self._first_use = {at: place for place, part in reversed([*enumerate(self._parts)]) for at in part.units}
        # Units with several uses apart from each other, and the place of the last.
        self._shared = {
            at: place
            for at, place in used.items()
            if at not in self._parts[place - 1].units and self._is_used_before(at, place)
        }
        self._always = [at for at in range(len(self._units)) if at not in used]
        self._trained = [at for at, unit in enumerate(self._units) if unit.policy.trainable]
        self._adds_in_place = self._accumulates and all(self._units[at].adds_in_place for at in self._trained)
        sizes = [self._units[at].grad_sizes(found.comm) for at in self._trained]
        # A unit's gradients between backward and update.
        self._held = {
            at: size.rested if self._units[at].policy.grads_cut == "replicated" else size.held
            for at, size in zip(self._trained, sizes, strict=True)
        }
        self._grads = dict(zip(reversed(self._trained), _grad_uses(self._units, sizes, config), strict=True))
        self._pool = _StatePool(self._units, self._trained, config)
        counts = range(len(self._trained) + 1)
        self._passing = [self._pool.ahead(count) + self._sinking(count) for count in counts]

    def highest(self) -> dict[str, int]:
        """Bytes on the device by category at the peak."""
        use = max((*self._forward(), *self._backward(), *self._update()), key=sum)
        found = self._resting.copy()
        for name, size in use._asdict().items():
            found[name.replace("_", " ")] += size
        return found

    def _weights(self, units: Iterable[int]) -> int:
        return sum(self._gathered[at] for at in {*self._always, *units})

    def _prefetched(self, units: Iterable[int], step: int) -> list[int]:
        """What is gathered while these compute: the unit after each in a forward, before each in a backward."""
        return [at + step for at in units if 0 <= at + step < len(self._units)]

    def _moving(self, units: Sequence[int]) -> int:
        """What one of the units has twice while it is gathered or released: the part that rests among the others. A
        rank that has all of it releases nothing."""
        return max((self._units[at].moved_bytes for at in units if self._gathered[at]), default=0)

    def _forward(self) -> Iterator[_Use]:
        kept, held = 0, sum(self._held.values()) if self._accumulates else 0
        sinking = self._sinking(len(self._trained))
        last = max((place for place, part in enumerate(self._parts) if part.units), default=0)
        for place, part in enumerate(self._parts):
            ahead = self._prefetched(part.units, 1)
            weights, updating = self._weights([*part.units, *ahead]), self._pool.updating if place < last else 0
            fullest = part.passes.forward
            yield _Use(weights, held, updating + sinking, kept + fullest.activations, fullest.logits)
            kept += part.passes.kept.activations
            yield _Use(weights, held, updating + sinking + self._moving([*part.units, *ahead]), kept)

    def _backward(self) -> Iterator[_Use]:
        kept = sum(part.passes.kept.activations for part in self._parts)
        arrived: Counter[int] = Counter()  # elements of units that the backward has reached, and not left
        waiting = list(self._trained)
        for place in reversed(range(len(self._parts))):
            part = self._parts[place]
            kept -= part.passes.kept.activations
            own = next((at for at in [*part.units, *self._always] if at in self._grads), None)
            again = [at for at in self._shared if place < self._shared[at]]  # tied ones stay gathered
            ahead = self._prefetched(part.units, -1)
            units = [*part.units, *ahead, *again]
            weights, last = self._weights(units), 0
            before = arrived[own] if own is not None else 0
            for snapshot in part.passes.backward:
                if own is not None:
                    arrived[own] = min(before + snapshot.arrived, self._units[own].layout.numel)
                last = snapshot.activations
                yield self._arriving(waiting, arrived, snapshot)._replace(
                    weights=weights, activations=kept + last, logits=snapshot.logits
                )
            # This part is left before the next one is reached, and what comes before that prefetched.
            boundary = self._arriving(waiting, arrived, Snapshot())
            yield boundary._replace(weights=weights + self._moving(units), activations=kept + last)
            # A unit is left with its first part, one that is always in use at the end.
            while waiting and waiting[-1] in part.units and not self._is_used_before(waiting[-1], place):
                yield self._leave(waiting, arrived)._replace(
                    weights=self._weights([*ahead, *again]), activations=kept + last
                )
            reached = [*ahead, *again, *self._prefetched(ahead, -1)]
            boundary = self._arriving(waiting, arrived, Snapshot())
            yield boundary._replace(weights=self._weights(reached) + self._moving(reached), activations=kept + last)
        while waiting:
            weights = self._weights(waiting[-1:])
            yield self._leave(waiting, arrived)._replace(weights=weights)

    def _is_used_before(self, at: int, place: int) -> bool:
        return self._first_use.get(at, place) < place

    def _arriving(self, waiting: Sequence[int], arrived: Mapping[int, int], snapshot: Snapshot) -> _Use:
        """Gradients while those of a unit arrive; `waiting` are not reduced."""
        resting, in_flight = self._grads[waiting[-1]][:2] if waiting else (sum(self._held.values()), 0)
        own = self._open_bytes(arrived)
        if self._adds_in_place and any(self._units[at].policy.weight_dtype.itemsize < 4 for at in arrived):
            own += 4 * snapshot.arriving  # in fp32, in addition to the sum
        return _Use(grads=resting, in_flight=in_flight + own + self._passing[len(waiting)])

    def _leave(self, waiting: list[int], arrived: Counter[int]) -> _Use:
        """Gradients when the backward leaves the last unit of `waiting`, which waits no more."""
        at, passing = waiting[-1], self._passing[len(waiting)]
        del arrived[waiting.pop()]
        grads = self._grads[at]
        in_flight = grads.leaving - grads.resting + self._open_bytes(arrived)
        return _Use(grads=grads.resting, in_flight=in_flight + passing)

    def _sinking(self, waiting: int) -> int:
        """Reduced gradients on their way to the host while `waiting` units are not reduced. Their buffers are freed two
        uses later, those of a micro-batch in the next one."""
        last = [*self._trained[waiting:], *(self._trained if self._accumulates else ())][:FREED_LATER]
        reduced = [self._units[at] for at in last]
        return sum(
            unit.layout.shard_numel * unit.held_dtype.itemsize for unit in reduced if unit.policy.grads_tier != "device"
        )

    def _open_bytes(self, arrived: Mapping[int, int]) -> int:
        """Gradients that autograd has made, and has not added to those of earlier micro-batches: it waits for the last
        use of a parameter."""
        total = 0
        for at, numel in arrived.items():
            policy = self._units[at].policy
            if not self._adds_in_place:
                total += numel * policy.grad_dtype.itemsize
            elif at in self._shared:
                total += numel * policy.weight_dtype.itemsize
        return total

    def _update(self) -> Iterator[_Use]:
        """Unit by unit: gradients in fp32 take the place of those in 16 bits."""
        held = sum(self._held.values())
        if self._pool.count:
            yield _Use(grads=held, in_flight=max(self._pool.updating, self._pool.ahead(0)))
            return
        sizes = [self._units[at].update_sizes for at in self._trained]
        for batch in update_batches(sizes):
            ready = 0
            for index in batch:
                yield _Use(grads=held, in_flight=ready + sizes[index].preparing)
                ready += sizes[index].ready
            held -= sum(self._held[self._trained[index]] for index in batch)


class _StatePool:
    """The buffers on the device through which offloaded states pass, as the engine reckons."""

    def __init__(self, units: Sequence[UnitPlan], trained: Sequence[int], config: Config) -> None:
        each = moment_bytes(config)
        away = [(unit, size) for unit in units if (size := offloaded_bytes(unit, each).total())]
        context = OffloadContext(
            torch.device("cpu"), Ledger(), config.offload, sum(unit.layout.shard_numel for unit, _ in away)
        )
        self.count = self._buffer_bytes = self._buckets = self._scratch = 0
        self._trained, self._context = len(trained), context
        self._gathers = config.placement.weights.tier != "device"
        for unit, size in away:
            numel = unit.layout.shard_numel
            buckets = -(-numel // context.bucket_numel)
            context.expect(buckets)
            if unit.policy.trainable:
                most = min(numel, context.bucket_numel)
                self._buckets += buckets
                self._buffer_bytes = max(self._buffer_bytes, size * most // numel)
                self._scratch = max(self._scratch, 4 * most if unit.cast_bytes else 0)
                self.count = context.pool.count

    @property
    def updating(self) -> int:
        """In an update, and in the forward after it, in which weights off the device are updated as they are gathered:
        their buffers are freed two uses later."""
        count = min(self.count + (FREED_LATER if self._gathers else 0), self._buckets)
        return count * self._buffer_bytes + self._scratch

    def ahead(self, waiting: int) -> int:
        """In a backward while `waiting` units are not reduced: what was fetched ahead of the update, and the buffers of
        weights off the device."""
        left = self._trained - waiting  # the weights of the first unit are gathered since the forward
        count = min(TRANSFER_BUFFERS + FREED_LATER, self.count) if self._gathers and left else 0
        if left > 1:
            count = max(count, self._context.prefetch_limit(left / self._trained))
        return min(count, self._buckets) * self._buffer_bytes


def _grad_uses(units: Sequence[UnitPlan], sizes: Sequence[GradSizes], config: Config) -> Iterator[GradUse]:
    trained, accumulates = [unit for unit in units if unit.policy.trainable], config.batch.accumulation > 1
    in_place = accumulates and all(unit.adds_in_place for unit in trained)
    if in_place or config.placement.grads.sharding == "replicated":
        return replicated_uses(sizes, accumulates)
    if units[0].shape.world_size == 1:
        alone = [replace(size, sent=0, received=0, block_numel=0) for size in sizes]
        return sharded_uses(alone, accumulates, _ALONE)
    return sharded_uses(sizes, accumulates, units[0].reduce_plan)


class _UsedPart(NamedTuple):
    """A part of the model in forward order, and the numbers of the units that it uses."""

    passes: Passes
    units: list[int]


def _parts_of(model: ModelSpec, workload: Workload, units: Sequence[UnitPlan]) -> Iterator[_UsedPart]:
    if model.dimensions is None:
        for at, unit in enumerate(units):
            yield _UsedPart(Passes(backward=(Snapshot(arrived=unit.layout.numel),)), [at])
        return
    owned = {path for unit in units for path in unit.spec.runs[0]}
    users: defaultdict[str, list[int]] = defaultdict(list)
    for at, unit in enumerate(units):
        for path in {path for run in unit.spec.runs for path in run}:
            users[path].append(at)
    for path, passes in decoder_passes(model.dimensions, workload, owned if workload.checkpointing else ()).items():
        yield _UsedPart(passes, users[path])
