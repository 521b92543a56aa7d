"""The gradients of a unit: where autograd leaves them, how they are reduced, and what is held of them.

Names, used throughout:
- *local*: gradients as autograd makes them, in `p.grad` (see `reduce_scatter`).
- *full*: where gradients are replicated, or one rank is alone, the unit's flat gradients of this rank. Local gradients
  are moved there when the backward has left the unit, and `p.grad` is then a view of it, to which later micro-batches
  add in place, until the reduce-scatter.
- *node sum*: where gradients are sharded over a node, this rank's part of the mean over its node, added up over the
  micro-batches; across nodes it is reduced once, with the last one.
- *shard*: this rank's shard of the mean over the ranks (see `reduced_shard`).

In a backward, `p.grad` is what counts until the reduce-scatter, also if the user changed or replaced it; after it, it
is None. Between backwards and updates the gradients may be *held*: `p.grad` then has no values (see `held_grads`).

The states, and what makes the transitions:

              open                collect             start_reduce             finish_reduce
    EMPTY ──────────▶ ARRIVING ──────────▶ LOCAL ──────────────▶ REDUCING ──────────────▶ REDUCED
                       ▲  ▲                 │                        ▲                      │  │
                       │  └──────open───────┘                        └────start_reduce──────┘  │
                       └──────────────────────────────open─────────────────────────────────────┘

LOCAL exists where there are full gradients, or where they are sharded over a node: there `finish_reduce` leads to it
from all micro-batches but the last. `start_reduce` also leads from EMPTY and ARRIVING, and to REDUCED at once
where one rank is alone. Sharded gradients go from REDUCED back to ARRIVING with the next micro-batch. `forget` and
`clear` lead from anywhere to EMPTY.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import cached_property

import torch

from shardwise.comm import Comm, Handle
from shardwise.config.shape import AXES, Axis, Sharding, axes_between
from shardwise.errors import GradientError
from shardwise.memory import Buffer, Entry, Kind, Ledger, Tier
from shardwise.offload.offloaded_states import OffloadedStates
from shardwise.offload.unit_states import GRADS, UnitStates
from shardwise.partition import Span
from shardwise.partition.dtensors import like
from shardwise.profiling import mark
from shardwise.unit.held_grads import HeldGrads
from shardwise.unit.params import PLAINLY
from shardwise.unit.plan import UnitPlan
from shardwise.unit.reduce_scatter import AutogradGrads, FlatGrads, Packing, ReduceScatter
from shardwise.unit.reduced_shard import HeldShard, OffloadedShard, ReducedShard, SegmentShard


class GradsState(enum.Enum):
    """Where the gradients of the current step are; see the drawing above."""

    EMPTY = "empty"
    ARRIVING = "arriving"
    LOCAL = "local"
    REDUCING = "being reduced"
    REDUCED = "reduced"

    __hash__ = object.__hash__  # see `memory.Kind`


_EMPTY, _ARRIVING, _LOCAL, _REDUCING, _REDUCED = GradsState
_NEXT = {
    _EMPTY: {_ARRIVING, _LOCAL, _REDUCING, _REDUCED},
    _ARRIVING: {_LOCAL, _REDUCING, _REDUCED},
    _LOCAL: {_ARRIVING, _REDUCING, _REDUCED},
    _REDUCING: {_LOCAL, _REDUCED},
    _REDUCED: {_ARRIVING, _REDUCING},
}


class Grads:
    """The gradients of one trainable unit."""

    def __init__(
        self, plan: UnitPlan, params: Sequence[torch.Tensor], comm: Comm, ledger: Ledger, states: UnitStates
    ) -> None:
        layout, policy = plan.layout, plan.policy
        self.name = plan.name
        self.state = GradsState.EMPTY
        self._plan = plan
        self._policy = policy
        self._comm = comm
        self._ledger = ledger
        self._gathering: Handle | None = None
        self._reducing: list[ReduceScatter] = []
        self._reductions: dict[bool, list[ReduceScatter]] = {}
        self._is_final = True
        self._apart: set[int] = set()
        self._whole: Buffer | None = None
        self._is_alone = plan.is_alone
        self._held = self._buffer(Kind.GRADS, plan.part_numel(policy.grads_cut), plan.held_dtype)
        self._full = self._held if plan.adds_in_place else None
        is_packed_apart = self._full is None and not self._is_alone
        packed = self._buffer(Kind.WORK, layout.numel, policy.reduce_dtype) if is_packed_apart else self._held
        self._packing = Packing(packed, layout)
        # What `p.grad` is while it is a view of `full`.
        views = self._packing.views if self._full is not None else ()
        self._grad_views = [like(param, view) for param, view in zip(params, views, strict=False)]
        self._local = AutogradGrads(plan.name, params, self._packing, layout, ledger)
        self._shard = self._shard_in(states)
        with PLAINLY():
            for param in params:
                param.grad = None
                param.grad_dtype = policy.grad_dtype  # lets an fp32 view collect the gradients of a 16-bit parameter

    def _buffer(self, kind: Kind, numel: int, dtype: torch.dtype) -> Buffer:
        return Buffer(self._ledger, Entry(kind, self.name, Tier.DEVICE), numel, dtype, self._comm.device)

    def _shard_in(self, states: UnitStates) -> ReducedShard:
        counted = self._plan.layout.counted(self._comm.shard_index)
        if self._policy.grads_cut != "sharded":
            return SegmentShard(self._held.view(self._own_part_of(self._policy.grads_cut)), counted)
        if isinstance(states, OffloadedStates) and GRADS in states:
            return OffloadedShard(self._held, counted, states, self._comm)
        return HeldShard(self._held, counted)

    def _own_part_of(self, cut: Sharding) -> Span:
        """This rank's shard as a part of what it holds of a buffer that is cut in this way."""
        numel = self._plan.layout.numel
        return self._comm.part(numel, "sharded").shift(-self._comm.part(numel, cut).start)

    @property
    def shard(self) -> ReducedShard:
        """This rank's shard of the reduced gradients."""
        assert self.is_reduced, f"the gradients of {self.name} are {self.state.value}, not reduced"
        return self._shard

    @property
    def is_reduced(self) -> bool:
        return self.state is _REDUCED

    @property
    def has_gradients(self) -> bool:
        """Whether a backward of this step has reached the unit, or it was reduced."""
        return self.state is not _EMPTY

    # In a backward

    def open(self) -> None:
        """The backward reaches the unit: gradients are about to arrive."""
        self._check_not_final()
        self._shard.prefetch()
        if self._full is not None and self.is_reduced:
            self._local.add_to(self._grad_views)
        self._local.expect(self._arriving_bytes())
        if self._full is not None and self._full.live and self.state is not _ARRIVING:
            self._apart = self._local.take_hooked()
        if self.state is not _REDUCING:  # else they are late, which `late_gradient` reports
            self._enter(_ARRIVING)

    def _arriving_bytes(self) -> int:
        """What autograd makes: all gradients of the unit, or, to add to those that are there, one at a time."""
        layout, weights, grads = self._plan.layout, self._policy.weight_dtype, self._policy.grad_dtype
        if self._full is None or not self._full.live:
            return layout.numel * grads.itemsize
        largest = max((slot.span.numel for slot in layout.slots), default=0)
        return largest * (grads.itemsize + (weights.itemsize if weights != grads else 0))

    def _check_not_final(self) -> None:
        if self._policy.grads_cut != "sharded" and self.is_reduced:
            raise RuntimeError(
                f"the gradients of {self.name} were already reduced in this step, and another backward would add to "
                "them: call backward once on the sum of the losses, or inside engine.no_sync() all but the last "
                'time, or set gradients.reduce_at to "step"'
            )

    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add gradients of the parameters that were computed outside of a backward."""
        self.open()
        self._local.add([grad if grad is None else grad.detach().to(self._policy.grad_dtype) for grad in grads])

    def collect(self) -> None:
        """Move the local gradients of this micro-batch into `full`, where there is one."""
        if self._full is None:
            return
        self._check_not_final()
        pairs = list(zip(self._local.as_left(), self._grad_views, strict=True))
        are_in_place = [grad is view for grad, view in pairs]
        # A unit that no backward has reached stays EMPTY, also while `full` holds zeros for it.
        has_arrived = self.has_gradients or any(grad is not None and grad is not view for grad, view in pairs)
        if not self._full.live:
            self._full.allocate()
        if not any(are_in_place) and not self._apart:
            self._packing.fill(self._local.read())
        else:
            arrived = zip(self._packing.views, self._local.read(), are_in_place, strict=True)
            for index, (place, grad, is_in_place) in enumerate(arrived):
                if index in self._apart:
                    if grad is not None:
                        place.add_(grad.detach())
                elif grad is None:
                    place.zero_()
                elif not is_in_place:
                    place.copy_(grad.detach())
        self._apart = set()
        self._local.replace(self._grad_views)
        if has_arrived:
            self._enter(_LOCAL)

    @property
    def is_cut_by_node(self) -> bool:
        """Whether every micro-batch is reduced in the node, and the last one across nodes as well."""
        return self._policy.grads_cut == "node"

    def start_reduce(self, is_final: bool = True) -> None:
        """Send every rank its part. `finish_reduce` waits for this rank's part and adds it up."""
        with mark("reduce", self.name):
            if self._full is not None and self.is_reduced:
                self.open()  # no backward of this micro-batch has
            self.collect()
            if self._is_alone:
                self._reduce_alone()
                return
            self._is_final = is_final
            if is_final not in self._reductions:
                self._reductions[is_final] = self._make_reductions(is_final)
            self._reducing = list(self._reductions[is_final])
            self._reducing[0].start()
            if self._full is not None:
                self._local.drop()
            self._enter(_REDUCING)

    def _make_reductions(self, is_final: bool) -> list[ReduceScatter]:
        """The reduce-scatters to run: from local gradients to what is held, over the axes that cut it, and from there
        to the shard, over the others."""
        cut, hops = self._policy.grads_cut, self._comm.hops
        arguments, made = (self._comm, self._ledger), []
        if cut != "replicated":
            held = self._shard if cut == "sharded" else HeldShard(self._held, ())
            made.append(ReduceScatter(self._plan, self._local, held, *arguments, hops(AXES[cut])))
        if cut != "sharded" and is_final:
            source = FlatGrads(self._held.tensor, self._policy.sum_dtype)
            made.append(ReduceScatter(self._plan, source, self._shard, *arguments, hops(axes_between("sharded", cut))))
        return made

    def _reduce_alone(self) -> None:
        """The gradients of one rank are the mean over all ranks."""
        _, adds = self._shard.target()
        if self._full is None:
            (self._packing.add if adds else self._packing.fill)(self._local.read())
        self._local.drop()
        self._shard.store()
        self._enter(_REDUCED)

    def finish_reduce(self) -> bool:
        """Wait for a reduce-scatter in flight, and add its mean to this rank's shard; False if another follows it."""
        if self._reducing:
            with mark("reduce", self.name):
                self._reducing.pop(0).finish()
                if self._reducing:
                    self._reducing[0].start()
                    return False
                self._enter(_REDUCED if self._is_final or self._policy.grads_cut == "sharded" else _LOCAL)
        return True

    @property
    def is_in_flight(self) -> bool:
        """Whether a reduce-scatter is in flight."""
        return bool(self._reducing)

    def late_gradient(self) -> bool:
        """Whether a gradient arrived after the unit was reduced, and so is in no rank's sum."""
        is_collected = self._policy.grads_cut == "replicated"
        may_be_late = self.is_reduced or (self.state in (_ARRIVING, _LOCAL) and not is_collected)
        return may_be_late and self._local.exist()

    # Between backwards and updates

    @cached_property
    def _held_grads(self) -> HeldGrads:
        return HeldGrads(
            [slot.spec.name for slot in self._plan.layout.slots], self._local.params, self._policy.grad_dtype
        )

    def hold(self) -> None:
        """After a backward: `p.grad` of every parameter shows that the engine holds the gradient."""
        self._held_grads.put()

    def changed_by_hand(self) -> list[tuple[str, torch.Tensor | None]]:
        """What the user has put into `p.grad` of held gradients since, by name; None where it was dropped."""
        return self._held_grads.changed()

    def let_go(self) -> None:
        """Before a backward or an update: `p.grad` is as `hold` found it, and has what autograd added meanwhile."""
        arrived = self._held_grads.take_off()
        is_local = self._full is not None and self._full.live and self.state in (_EMPTY, _LOCAL)
        if is_local:
            self._local.replace(self._grad_views)
        if arrived:
            self.open()
            self._local.add(arrived)

    @property
    def were_set_by_hand(self) -> bool:
        """Whether a parameter has a gradient that no backward of this engine has brought."""
        return self.state is _EMPTY and self._local.exist()

    def drop_local(self) -> None:
        """Drop gradients that the user has set, where no backward has left any."""
        self._local.drop()

    # In an update

    def start_gather(self) -> None:
        """Where several ranks update one element: bring each of them the reduced gradients that it needs."""
        if not self._gather_axes or self._comm.world_size == 1 or self._gathering is not None:
            return
        if self._plan.makes_whole:
            self._whole = self._buffer(Kind.WORK, self._plan.owned_numel, self._policy.accumulate_dtype)
            self._whole.allocate()[self._own_part_of(self._policy.optim_cut).slice] = self.shard.tensor
        self._gathering = self._comm.gather(self._everything, "reduce", self.name, self._gather_axes)

    @cached_property
    def _gather_axes(self) -> tuple[Axis, ...]:
        return axes_between("sharded", self._policy.optim_cut)

    def owned(self) -> torch.Tensor:
        """The reduced gradients of the elements whose optimizer state this rank holds."""
        if not self._gather_axes or self._comm.world_size == 1:
            return self.shard.tensor
        self.start_gather()
        assert self._gathering is not None
        self._gathering.wait()
        return self._everything

    def full_copy(self) -> torch.Tensor:
        """The whole unit's reduced gradients, in a fresh tensor. A collective."""
        shard = self.shard.tensor
        full = shard.new_empty(self._plan.layout.numel)
        full[self._own_part_of("replicated").slice] = shard
        self._comm.gather(full, "control", self.name).wait()
        return full

    def local_copy(self, name: str) -> torch.Tensor:
        """One parameter's gradient as this rank alone has added it up, before it is reduced."""
        if self._full is None:
            raise GradientError(
                f"the gradient of {name!r} is not reduced yet, and sharded gradients have no local sum: ask after the "
                "backward that ends the accumulation"
            )
        slot = self._plan.layout.slot(name)
        return self._full.tensor[slot.span.slice].view(slot.spec.shape).clone()

    @property
    def _everything(self) -> torch.Tensor:
        return (self._whole or self._held).tensor

    # Between steps

    def forget(self) -> None:
        """The gradients of this step are used, or a pending update will read them: the next ones start anew."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        for reducing in self._reducing:
            reducing.abandon()
        self._reducing = []
        self._shard.forget()
        self._enter(_EMPTY)

    def clear(self) -> None:
        """Forget the gradients of this step and free their buffers."""
        self.forget()
        self._shard.free()
        self._local.drop()  # before `full`, of which `p.grad` may be a view
        self._held.free()
        if self._whole is not None:
            self._whole.free()
        self._whole = None

    def make_resident(self, states: UnitStates) -> None:
        """Hold the shard where `states` say from now on. Between steps."""
        assert not self.has_gradients, f"the gradients of {self.name} are {self.state.value}"
        self._shard = self._shard_in(states)
        self._reductions.clear()

    def _enter(self, state: GradsState) -> None:
        """The one place where the state changes."""
        if state is not self.state and state is not _EMPTY and state not in _NEXT[self.state]:
            raise RuntimeError(f"the gradients of {self.name} are {self.state.value} and cannot be {state.value}")
        self.state = state
