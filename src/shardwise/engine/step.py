"""A step: its gradients, from the first micro-batch to their norm, and the update that ends it.

`StepGrads` is what happens to gradients between backwards and updates: they are held for the user, dropped, or final.
`Clip` is what the update multiplies final gradients by: it follows from the global norm, the loss scale and clipping,
all on the device. `StepUpdate` runs the optimizer on the shards of all units and sends the new weights
to the ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from shardwise.comm import Comm
from shardwise.config import Config
from shardwise.engine.failures import all_or_nothing
from shardwise.engine.residency import Budget
from shardwise.errors import GradientError, Notices
from shardwise.offload.context import OffloadContext
from shardwise.offload.offloaded_states import OffloadedStates, prefetch
from shardwise.offload.unit_states import UnitStates
from shardwise.optim import Updater
from shardwise.profiling import Clock
from shardwise.schedule import Schedule
from shardwise.unit import Unit, norm
from shardwise.unit.held_grads import HeldGrads
from shardwise.unit.reduced_shard import ReducedShard

GradHook = Callable[[str, torch.Tensor], None]


class StepGrads:
    """What happens to the gradients of trainable units between backwards and updates.

    `hold` and `let_go` frame the time in which `p.grad` has no values. Gradients become final, once in a step, by
    `clip` or by the update: they are reduced, the hooks have edited them, and their norm is known.

    syncs     whether replicated gradients are reduced by the last backward of a step
    boundary  whether the next step updates; None where the number of `micro_batches` decides
    """

    def __init__(self, units: Sequence[Unit], config: Config, comm: Comm, notices: Notices) -> None:
        self.hooks: list[GradHook] = []
        self.syncs = True
        self.boundary: bool | None = None
        self._units = units
        self._settings = settings = config.gradients
        self._are_sharded = config.placement.grads.sharding == "sharded"
        self.micro_batches = config.batch.accumulation
        self._micro_step = 0
        self._backwards = 0  # since the last call of step()
        self._comm = comm
        self._notices = notices
        self._is_held = False
        self._norm: torch.Tensor | None = None
        self._limit = settings.clip_norm
        self._drops = 0
        self._held_pieces: dict[str, tuple[UnitStates, HeldGrads]] = {}

    @property
    def is_boundary(self) -> bool:
        """Whether the next step updates."""
        return self.boundary if self.boundary is not None else self._micro_step == self.micro_batches - 1

    @property
    def is_midway(self) -> bool:
        """Whether the step has had micro-batches, but not the last."""
        return self._micro_step > 0

    @property
    def are_reduced(self) -> bool:
        """Whether the coming backward reduces over all ranks: sharded gradients always, others at the boundary."""
        return self._are_sharded or (self.is_boundary and self.syncs and self._settings.reduce_at == "backward")

    @property
    def are_gathered_early(self) -> bool:
        """Whether reduced gradients are final, so that a replicated optimizer's ranks may gather them before the
        step: no hook edits them."""
        return not self._are_sharded and not self.hooks

    def next_micro_batch(self) -> None:
        """A step that does not update."""
        if self._backwards == self.micro_batches:
            self._notices.say(
                "steps counted",
                f"a step() came after {self._backwards} backwards, and batch.accumulation is {self.micro_batches}: the "
                "engine counts calls of step(), one for each micro-batch, and updates once in so many. "
                "If these backwards were the micro-batches of a step, call step() after each of them, or leave "
                "batch.accumulation out",
            )
        self._backwards = 0
        self._micro_step += 1
        self._comm.micro_step = self._micro_step

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Around a step that updates. Its operations are still those of the last micro-batch."""
        self._micro_step = self._backwards = 0
        yield
        self._comm.micro_step = 0

    def hold(self) -> None:
        """A backward has ended. With `reduce_at: step`, the user reads and edits local gradients instead."""
        if self._settings.reduce_at == "backward":
            self._is_held = True
            for unit in self._units:
                unit.grads.hold()
                self._held_on_pieces(unit).put()

    def let_go(self, drop: Callable[[], None]) -> None:
        """A backward or an update begins. If the user has set all `p.grad` to None, `drop` is called."""
        if not self._is_held:
            return
        changed = [change for unit in self._units for change in unit.grads.changed_by_hand()]
        on_pieces = [change for _, held in self._held_pieces.values() for change in held.changed()]
        if not changed and not on_pieces:
            for unit in self._units:
                unit.grads.let_go()
            self._take_off_pieces()
        elif _all_dropped(changed, self._param_count) or _all_dropped(on_pieces, self._piece_count):
            drop()
        else:
            name, grad = (changed or on_pieces)[0]
            raise GradientError(
                f"p.grad of {name!r} was {'dropped' if grad is None else 'set by hand'} after a backward, while the "
                "engine holds the gradients of the step, and would have no effect: edit them in "
                "engine.register_grad_hook(fn), or call engine.zero_grad() and set p.grad of all parameters before "
                "engine.step()"
            )

    @property
    def _param_count(self) -> int:
        return sum(len(unit.params) for unit in self._units)

    @property
    def _piece_count(self) -> int:
        return sum(len(unit.weights.pieces) for unit in self._units)

    def _held_on_pieces(self, unit: Unit) -> HeldGrads:
        """What shows the same on the optimizer's parameters: GradScaler and others look there."""
        states, held = self._held_pieces.get(unit.name, (None, None))
        if held is None or states is not unit.states:  # states that have moved are on another device
            params = [piece.param for piece in unit.weights.pieces]
            held = HeldGrads([f"{unit.name} (master)"] * len(params), params)
            self._held_pieces[unit.name] = unit.states, held
        return held

    def _take_off_pieces(self) -> None:
        if self._is_held:
            for _, held in self._held_pieces.values():
                held.take_off()
        self._is_held = False

    def check_may_grow(self) -> None:
        """A backward is about to add to the gradients."""
        self._backwards += 1
        if self._norm is not None:
            raise GradientError(
                "a backward after engine.clip_grad_norm_() would add to gradients that are already clipped: call "
                "engine.step() or engine.zero_grad() first"
            )

    @property
    def exist(self) -> bool:
        """Whether there are gradients to update with: of a backward, or set by hand."""
        return any(unit.grads.has_gradients or unit.grads.were_set_by_hand for unit in self._units)

    def clip(self, schedule: Schedule, clock: Clock, scale: torch.Tensor | None, limit: float) -> torch.Tensor:
        """Make the update clip the norm at `limit` as well; returns the norm without the loss scale."""
        self._limit = limit if self._limit is None else min(self._limit, limit)
        norm = self.finish(schedule, clock, scale).grad_norm
        self.hold()
        return norm

    def reduce(self, schedule: Schedule, drop: Callable[[], None]) -> None:
        """Reduce what was left to the update."""
        self.let_go(drop)
        schedule.backward.reduce_all()
        self.hold()

    def set_norm(self, norm: torch.Tensor) -> None:
        """The norm of a larger model, of which these gradients are a part and already final."""
        assert self._norm is not None, "the gradients are not final"
        self._norm = norm

    def finish(self, schedule: Schedule, clock: Clock, scale: torch.Tensor | None) -> Clip:
        """Make the gradients final, and find what the update multiplies them with."""
        if self._norm is None:
            schedule.backward.reduce_all()
            schedule.gathers.unlock_all()
            schedule.gathers.release_all()
            units = [unit for unit in schedule.gathers.unit_order.forward if unit.is_trainable]
            for hook in self.hooks:
                for unit in units:
                    unit.grads.shard.edit(partial(hook, unit.name))
            shards = [unit.grads.shard for unit in units]
            with clock.phase("norm"):
                self._norm = grad_norm(shards, self._comm, self._settings.deterministic)
        return unscale(self._norm, scale, self._limit)

    def used(self) -> None:
        """An update has used the gradients."""
        self._drops = 0
        self._start_anew()

    def dropped(self) -> None:
        """The gradients were dropped."""
        self._drops += self.is_midway
        self._micro_step = self._comm.micro_step = self._backwards = 0
        self._start_anew()
        if self._drops == 2:
            self._notices.say(
                "zero_grad",
                "zero_grad() dropped an unfinished accumulation twice, and no step has updated in between: call it "
                "only after the engine.step() that updates, or not at all, because that step drops them itself",
            )

    def _start_anew(self) -> None:
        self._take_off_pieces()
        self._norm = None
        self._limit = self._settings.clip_norm


class StepUpdate:
    """Updates the units of a schedule with final gradients, and prefetches offloaded states for it."""

    def __init__(
        self,
        updater: Updater,
        units: Sequence[Unit],
        schedule: Schedule,
        offload: OffloadContext,
        budget: Budget,
        clock: Clock,
    ) -> None:
        self._updater = updater
        self._units = units
        self._schedule = schedule
        self._offload = offload
        self._budget = budget
        self._clock = clock
        self._is_offloaded = self._has_offloaded()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._updater.optimizer

    def call_pre_hooks(self) -> None:
        self._updater.call_pre_hooks()

    def prefetch(self) -> None:
        """Fetch the states of the units that are updated first, as far as the backward has got."""
        if self._is_offloaded:
            prefetch(self._offload, self._streamed_states(), self._schedule.backward.reduced_part())

    def apply(self, clip: Clip, drop: Callable[[], None]) -> None:
        """Update the units and start the gathers of their new weights, without waiting. If it raises, `drop` drops the
        remaining gradients."""
        updater, units = self._updater, self._trainable()
        self._offload.begin_step()
        with self._clock.phase("update"), all_or_nothing(drop):
            if updater.begin(clip.overflow):
                for unit in units:
                    unit.grads.clear()
            else:
                for batch in updater.batches(units):
                    updater.update(batch, clip.coefficient)
                    for unit in batch:
                        unit.weights.refresh()
        self._offload.streams.drain()
        updater.finish()

    def spend_budget(self) -> None:
        """After a step: move states to the device that the memory budget has room for."""
        if self._budget.spend(self._trainable(), self._updater, self._offload.staging):
            self._is_offloaded = self._has_offloaded()

    def _trainable(self) -> list[Unit]:
        return [unit for unit in self._schedule.gathers.unit_order.forward if unit.is_trainable]

    def _streamed_states(self) -> Iterator[OffloadedStates]:
        """The states that an update copies to the device, in its order."""
        for unit in self._schedule.gathers.unit_order.forward:
            states = unit.states
            if isinstance(states, OffloadedStates) and states.is_streamed and not states.updates_on_host:
                yield states

    def _has_offloaded(self) -> bool:
        return any(unit.states.is_offloaded for unit in self._units)


def _all_dropped(changed: Sequence[tuple[str, torch.Tensor | None]], count: int) -> bool:
    """Whether the user has set `p.grad` to None for all of `count` parameters."""
    return 0 < len(changed) == count and all(grad is None for _, grad in changed)


class Clip(NamedTuple):
    """The norm without the loss scale, whether gradients overflowed, and 1/scale and clipping in one number."""

    grad_norm: torch.Tensor
    overflow: torch.Tensor | None
    coefficient: torch.Tensor | None


def grad_norm(shards: Sequence[ReducedShard], comm: Comm, exact: bool) -> torch.Tensor:
    """The global norm. Offloaded shards left their part of it on the device; only the exact norm fetches them."""
    if not shards:
        return torch.zeros((), dtype=torch.float64, device=comm.device)
    if exact:
        return norm.exact_norm(_CountedParts(shards), comm)
    here = [shard.counted_in(shard.tensor) for shard in shards if not shard.is_offloaded]
    sums = norm.sums_of_squares(here, comm)
    if len(here) < len(shards):
        known = iter(sums)
        sums = torch.stack([shard.sum_of_squares(comm) if shard.is_offloaded else next(known) for shard in shards])
    return norm.norm_from_sums(sums, comm)


def unscale(grad_norm: torch.Tensor, scale: torch.Tensor | None, limit: float | None) -> Clip:
    """The clip of gradients with this norm, whose loss was multiplied by `scale`."""
    overflow = None
    if scale is not None:
        overflow = ~grad_norm.isfinite()
        grad_norm = grad_norm / scale
    coefficient = norm.clip_coefficient(grad_norm, limit) if limit is not None else None
    if scale is not None:
        coefficient = (1.0 if coefficient is None else coefficient) / scale
    # With a dimension it takes part in promotion: its product with gradients of 16 bits is computed and stored in fp32.
    return Clip(grad_norm, overflow, None if coefficient is None else coefficient.view(1))


class _CountedParts:
    """The counted parts of shards, of which offloaded ones are fetched one at a time."""

    def __init__(self, shards: Sequence[ReducedShard]) -> None:
        self._shards = shards

    def __iter__(self) -> Iterator[torch.Tensor]:
        for shard in self._shards:
            yield from shard.counted_in(shard.tensor)
