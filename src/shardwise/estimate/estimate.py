"""The analytic mode: the peak of a rank from sizes alone.

It follows the engine through one step, unit by unit, and takes the highest of all moments. What it adds up comes from
where the engine has it: the units, their layouts and what may be in flight from `plan_units`, the course of gradients
from `reduce_plan`, bytes at rest from `costs`. What a decoder's layers allocate comes from `passes`.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn

from shardwise.config import Config
from shardwise.config.costs import moments_of
from shardwise.config.optimizers import optimizer_class
from shardwise.config.shape import NodeShape, shape_of
from shardwise.dry_run.comm import DryComm
from shardwise.dry_run.dry_run import CATEGORIES, Estimate
from shardwise.dry_run.kernels import CUBLAS_BYTES
from shardwise.engine.assembly import plan_units
from shardwise.engine.residency import Budget, moments_each, offloaded_bytes
from shardwise.estimate.passes import Lora, Moment, Passes, decoder_passes, meta_decoder
from shardwise.memory.ledger import Ledger
from shardwise.memory.reduce_plan import (
    GradMoments,
    GradSizes,
    ReducePlan,
    replicated_moments,
    sharded_moments,
    update_batches,
)
from shardwise.models.workload import ModelSpec, Workload
from shardwise.offload.context import OffloadContext
from shardwise.offload.offloaded_states import TRANSFER_BUFFERS
from shardwise.offload.streams import FREED_LATER
from shardwise.unit.plan import UnitPlan

UNKNOWN_LAYERS = 32
"""Into so many units a model is cut of which only the size is known."""
_ALONE = ReducePlan(parts=2, overlap=False)
"""One rank sends nothing: gradients are copied to where they are held."""


def estimate(model: ModelSpec, workload: Workload, config: Config, ranks: int | NodeShape) -> Estimate:
    """The peak of one rank under a configuration. Under tensor parallelism, `model` is its part (`ModelSpec.part`)."""
    shape = shape_of(ranks)
    step = _Step(model, workload, config.for_shape(shape), shape)
    highest = step.highest() | {"overhead": CUBLAS_BYTES}
    return Estimate({name: highest.get(name, 0) for name in CATEGORIES}, step.tiers())


def away_bytes(model: ModelSpec, workload: Workload, config: Config, ranks: int | NodeShape) -> list[int]:
    """What of each unit's states rests off the device, of one rank, in forward order; nothing of what is frozen."""
    shape = shape_of(ranks)
    units = units_of(model, workload.lora, config.for_shape(shape), shape)
    return [offloaded_bytes(unit, units.moments).total() for unit in units.plans if unit.policy.trainable]


@dataclass(frozen=True)
class Units:
    """The units of a model in the order of their first use, and the bytes that the optimizer keeps per element."""

    plans: tuple[UnitPlan, ...]
    comm: DryComm
    moments: int


def units_of(model: ModelSpec, lora: Lora | None, config: Config, shape: NodeShape) -> Units:
    """The units that the engine would make."""
    # Of the step, only whether several micro-batches are added up has a part in it.
    batch = {"accumulation": min(config.batch.accumulation, 2), "micro_batch_size": 1, "global_batch_size": None}
    alike = config.model_copy(update={"batch": config.batch.model_copy(update=batch)})
    return _units(_Key(alike.model_dump_json(), alike), model, lora, shape)


class _Key(str):
    """A configuration as the key of a cache."""

    config: Config

    def __new__(cls, text: str, config: Config) -> _Key:
        made = super().__new__(cls, text)
        made.config = config
        return made


@lru_cache(maxsize=512)
def _units(key: _Key, model: ModelSpec, lora: Lora | None, shape: NodeShape) -> Units:
    config = key.config
    comm = DryComm(min(2, shape.world_size - 1), shape, "cuda")
    module = _module(model, lora)
    optimizer = _optimizer(module, config)
    with _unlogged():
        plans = plan_units(module, optimizer, config, comm, Budget(config.offload, comm, Ledger()))
    section = config.optimizer
    return Units(tuple(plans), comm, moments_of(section.name, section.params) if section else moments_each(optimizer))


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
    """Bytes in use at one moment, beside what rests."""

    weights: int = 0
    grads: int = 0
    in_flight: int = 0
    activations: int = 0
    logits: int = 0


class _Step:
    """The moments of a step of one rank."""

    def __init__(self, model: ModelSpec, workload: Workload, config: Config, shape: NodeShape) -> None:
        found = units_of(model, workload.lora, config, shape)
        self._units, self._moments, self._shape = found.plans, found.moments, shape
        self._accumulates = config.batch.accumulation > 1
        self._adds_locally = config.placement.grads.sharding == "replicated" and self._accumulates
        self._parts = list(_parts_of(model, workload, self._units))
        self._gathered = [
            unit.full_bytes - unit.moved_bytes if unit.policy.weights_sharded else 0 for unit in self._units
        ]
        used = {at: place for place, part in enumerate(self._parts) for at in part.units}
        # Units with several uses apart from each other, and the place of the last.
        self._shared = {
            at: place
            for at, place in used.items()
            if at not in self._parts[place - 1].units and self._is_used_before(at, place)
        }
        self._always = [at for at in range(len(self._units)) if at not in used]
        self._trained = [at for at, unit in enumerate(self._units) if unit.policy.trainable]
        sizes = [self._units[at].grad_sizes(found.comm) for at in self._trained]
        self._held = {at: self._held_bytes(at, size) for at, size in zip(self._trained, sizes, strict=True)}
        self._grads = dict(zip(reversed(self._trained), _grad_moments(self._units, sizes, config), strict=True))
        self._pool = _StatePool(self._units, self._trained, found.moments, config)

    def highest(self) -> dict[str, int]:
        """Bytes on the device by category at the peak."""
        use = max((*self._forward(), *self._backward(), *self._update()), key=sum)
        found = self._at_rest()
        for name, size in use._asdict().items():
            found[name.replace("_", " ")] += size
        return found

    def tiers(self) -> dict[str, int]:
        """What rests off the device."""
        sizes = sum((offloaded_bytes(unit, self._moments) for unit in self._units), Counter[str]())
        return {tier: size for tier in ("host", "disk") if (size := sizes[tier])}

    def _at_rest(self) -> Counter[str]:
        """Bytes on the device by kind, without gradients, which come and go."""
        sizes: Counter[str] = Counter()
        for unit in self._units:
            for part in unit.policy.resting(self._moments):
                if part.tier == "device" and part.kind != "grads":
                    sizes[part.kind] += int(part.rank_bytes(unit.layout.numel, self._shape))
        return sizes

    def _held_bytes(self, at: int, sizes: GradSizes) -> int:
        """A unit's gradients between backward and update."""
        return sizes.rested if self._units[at].policy.grads_cut == "replicated" else sizes.held

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
        sinking = self._sinking(self._trained)
        last = max((at for at, part in enumerate(self._parts) if part.units), default=0)
        for place, part in enumerate(self._parts):
            ahead = self._prefetched(part.units, 1)
            weights, updating = self._weights([*part.units, *ahead]), self._pool.updating if place < last else 0
            at = part.passes.forward
            yield _Use(weights, held, updating + sinking, kept + at.activations, at.logits)
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
            for at in part.passes.backward:
                if own is not None:
                    arrived[own] = min(before + at.arrived, self._units[own].layout.numel)
                last = at.activations
                yield self._arriving(waiting, arrived, at)._replace(
                    weights=weights, activations=kept + at.activations, logits=at.logits
                )
            # This part is left before the next one is reached, and what comes before that prefetched.
            boundary = self._arriving(waiting, arrived, Moment())
            yield boundary._replace(weights=weights + self._moving(units), activations=kept + last)
            # A unit is left with its first part, one that is always in use at the end.
            while waiting and waiting[-1] in part.units and not self._is_used_before(waiting[-1], place):
                unit = waiting.pop()
                arrived.pop(unit, None)
                yield self._leaving(unit, arrived)._replace(
                    weights=self._weights([*ahead, *again]), activations=kept + last
                )
            reached = [*ahead, *again, *self._prefetched(ahead, -1)]
            boundary = self._arriving(waiting, arrived, Moment())
            yield boundary._replace(weights=self._weights(reached) + self._moving(reached), activations=kept + last)
        while waiting:
            unit = waiting.pop()
            arrived.pop(unit, None)
            yield self._leaving(unit, arrived)._replace(weights=self._weights([unit]))

    def _is_used_before(self, unit: int, place: int) -> bool:
        return any(unit in part.units for part in self._parts[:place])

    def _arriving(self, waiting: Sequence[int], arrived: Mapping[int, int], at: Moment) -> _Use:
        """Gradients while those of a unit arrive; `waiting` are not reduced."""
        resting, in_flight = self._grads[waiting[-1]][:2] if waiting else (sum(self._held.values()), 0)
        own = self._open_bytes(arrived)
        if self._adds_locally and any(self._units[unit].policy.weight_dtype.itemsize < 4 for unit in arrived):
            own += 4 * at.arriving  # in fp32, beside the sum
        return _Use(grads=resting, in_flight=in_flight + own + self._pool.ahead(len(waiting)) + self._sinking(waiting))

    def _leaving(self, unit: int, arrived: Mapping[int, int]) -> _Use:
        """Gradients when the backward leaves a unit."""
        moments = self._grads[unit]
        waiting = self._trained[: self._trained.index(unit) + 1]
        in_flight = moments.leaving - moments.resting + self._open_bytes(arrived)
        return _Use(
            grads=moments.resting, in_flight=in_flight + self._pool.ahead(len(waiting)) + self._sinking(waiting)
        )

    def _sinking(self, waiting: Sequence[int]) -> int:
        """Reduced gradients on their way to the host: their buffers are freed two uses later, those of a micro-batch in
        the next one."""
        last = [*self._trained[len(waiting) :], *(self._trained if self._accumulates else ())][:FREED_LATER]
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
            if not self._adds_locally:
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

    def __init__(self, units: Sequence[UnitPlan], trained: Sequence[int], moments: int, config: Config) -> None:
        away = [(unit, size) for unit in units if (size := offloaded_bytes(unit, moments).total())]
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
        """In a backward with so many units that are not reduced: what was fetched ahead of the update, and what weights
        off the device pass through."""
        left = self._trained - waiting
        is_first = self._trained - waiting == 0  # its weights are gathered since the forward
        count = min(TRANSFER_BUFFERS + FREED_LATER, self.count) if self._gathers and not is_first else 0
        if left > 1:
            count = max(count, self._context.prefetch_limit(left / self._trained))
        return min(count, self._buckets) * self._buffer_bytes


def _grad_moments(units: Sequence[UnitPlan], sizes: Sequence[GradSizes], config: Config) -> Iterator[GradMoments]:
    accumulates, world_size = config.batch.accumulation > 1, units[0].shape.world_size
    if config.placement.grads.sharding == "replicated":
        return replicated_moments(sizes, accumulates)
    if world_size == 1:
        alone = [replace(size, sent=0, received=0, block_numel=0) for size in sizes]
        return sharded_moments(alone, accumulates, _ALONE)
    return sharded_moments(sizes, accumulates, units[0].reduce_plan)


class _UsedPart(NamedTuple):
    """A part of the model in forward order, and the numbers of the units that it uses."""

    passes: Passes
    units: list[int]


def _parts_of(model: ModelSpec, workload: Workload, units: Sequence[UnitPlan]) -> Iterator[_UsedPart]:
    if model.dimensions is None:
        for at, unit in enumerate(units):
            yield _UsedPart(Passes(backward=(Moment(arrived=unit.layout.numel),)), [at])
        return
    owned = {path for unit in units for path in unit.spec.runs[0]}
    for path, passes in decoder_passes(model.dimensions, workload, owned if workload.checkpointing else ()).items():
        yield _UsedPart(passes, [at for at, unit in enumerate(units) if any(path in run for run in unit.spec.runs)])
