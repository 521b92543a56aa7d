"""The weights of a unit: what computes, what rests, and the gather and release between them.

Names, used throughout:
- *full*: the unit's flat buffer in the dtype that computes; the parameters of the model are views of it.
- *segment*: this rank's part of `full`, the elements it owns. It is filled from the *master* (see `master`), the other
  ranks' segments by a gather.
- *stand-in*: what a parameter points to while released (see `params`). Reads and writes raise.

The states, and what makes the transitions:

    RELEASED ──gather──▶ GATHERING ──wait_gather──▶ GATHERED
        ▲                    ▲                       │    │
        │                    └────────refresh────────┘    │
        └────────────────────release──────────────────────┘

RELEASED goes straight to GATHERED where nothing has to be waited for; `free` leads from anywhere to FREED. Parameters
are guarded (see `params`) in every state but GATHERED, and there while the user reads them and no module does.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from shardwise.comm import DONE, Comm, Handle
from shardwise.config.shape import AXES, Axis, axes_between
from shardwise.errors import ModelChangedError
from shardwise.memory import Buffer, Entry, Kind, Ledger, Tier
from shardwise.offload.unit_states import HERE, Arrival, UnitStates
from shardwise.profiling import mark
from shardwise.unit.master import MasterPiece, OffloadedMaster, RestingPart, make_master, pieces_of, read_values
from shardwise.unit.params import ParamBinding, ParamGuard
from shardwise.unit.plan import UnitPlan


class WeightsState(enum.Enum):
    """RELEASED: stand-ins. GATHERING: `full` is being filled. GATHERED: the parameters hold the current values."""

    RELEASED = "released"
    GATHERING = "being gathered"
    GATHERED = "gathered"
    FREED = "freed"

    __hash__ = object.__hash__  # see `memory.Kind`


_RELEASED, _GATHERING, _GATHERED, _FREED = WeightsState
_NEXT = {
    _RELEASED: {_GATHERING, _GATHERED, _FREED},
    _GATHERING: {_GATHERED, _FREED},
    _GATHERED: {_GATHERING, _RELEASED, _FREED},
    _FREED: set(),
}


class Weights:
    """The weights of one unit. `on_read` is called when a guarded parameter is used by hand; returns whether that is in
    the middle of a pass, which then has gathered it."""

    def __init__(
        self,
        plan: UnitPlan,
        params: Sequence[torch.Tensor],
        comm: Comm,
        ledger: Ledger,
        states: UnitStates,
        on_read: Callable[[], bool],
    ) -> None:
        layout, policy = plan.layout, plan.policy
        self.name = plan.name
        self.policy = policy
        self.params = list(params)
        self.state = WeightsState.RELEASED
        self.generation = 0
        self.owned = comm.part(layout.numel, policy.optim_cut)
        self.is_whole = self.owned.numel == layout.numel
        """Whether this rank owns every element, so that nothing need be gathered."""
        self._plan = plan
        self._comm = comm
        self._ledger = ledger
        self._on_read = on_read
        self._guard = ParamGuard(plan, self.params, self)
        self._locks = 0
        self._readers = 0
        self.is_read = False
        """Whether the user computes with the gathered values, and no module does: parameters are guarded."""
        self._handle: Handle = DONE
        self._aside: tuple[Buffer, Handle] | None = None
        entry = Entry(Kind.WEIGHTS, plan.name, Tier.DEVICE)
        self._full = Buffer(ledger, entry, layout.numel, policy.weight_dtype, comm.device)
        self._binding = ParamBinding(plan, self.params, self._full)
        self._axes = AXES[policy.optim_cut]
        self._segment = self._full.view(self.owned)
        self._rest: RestingPart | None = None
        if policy.weights_rest_apart:
            part = comm.part(layout.numel, policy.weights_cut)
            rest = Buffer(ledger, entry, part.numel, policy.weight_dtype, comm.device)
            others = axes_between(policy.optim_cut, policy.weights_cut)
            self._rest = RestingPart(part, rest, self._full.view(part), others)
            self._axes = AXES[policy.weights_cut]
            self._segment = rest.view(self.owned.shift(-part.start))
        runs = layout.updates(self.owned) if policy.trainable else ()
        self._master = make_master(plan, pieces_of(states.split(runs)), self._segment, states, ledger)

    @property
    def resting_part(self) -> torch.Tensor | None:
        """The weights that rest in addition to the master, if there are any."""
        return self._rest.buffer.tensor if self._rest is not None else None

    @property
    def master(self) -> torch.Tensor:
        """The owned elements as they are updated. Off the device, this blocks the host until they are there."""
        return self._master.values

    @property
    def pieces(self) -> list[MasterPiece]:
        """The optimizer's parameters."""
        return self._master.pieces

    def cut(self, owned: torch.Tensor) -> list[torch.Tensor]:
        """A flat tensor of the owned elements as the optimizer's pieces of it."""
        return self._master.cut(owned)

    def bind_pieces(self) -> None:
        """Point the optimizer's parameters at the master, after its storage has moved."""
        self._master.bind()

    @property
    def storage_id(self) -> int:
        """An identifier of the storage of `full`, which is valid also while that is freed."""
        return int(self._full.tensor.untyped_storage()._cdata)

    @property
    def full_bytes(self) -> int:
        """What the unit takes while it is gathered."""
        return self._full.size_bytes

    def adopt(self) -> None:
        """Take the model's values, rank 0's for all, and release them if they rest sharded.

        Parameters that were built without values have an origin instead, from which each rank reads what it needs.
        """
        if self._adopt_at_rest():
            return
        # Rank 0's values are sent in the master's dtype: a 16-bit copy would lose what the master must keep.
        is_exact = self.policy.weight_dtype == self.policy.master_dtype
        if is_exact:
            exact = self._full.allocate().zero_()
        else:
            exact = torch.zeros(self._full.tensor.numel(), dtype=self.policy.master_dtype, device=self._comm.device)
        read_values(exact, self._plan, self.params, self._comm)
        if self._rest is not None:
            self._rest.buffer.allocate().copy_(exact[self._rest.span.slice])
        self._master.adopt(exact[self.owned.slice], in_segment=True)
        if not is_exact:
            self._full.allocate().copy_(exact)
        self._binding.adopt(self.policy.weight_dtype)
        self._enter(WeightsState.GATHERED)
        if self.policy.weights_sharded:
            self.release()

    def _adopt_at_rest(self) -> bool:
        """Read the values of a frozen unit that rests off the device from their origins to where they rest; returns
        whether it is one. They need no room on the device."""
        master, policy = self._master, self.policy
        if not isinstance(master, OffloadedMaster) or not policy.weights_sharded or policy.trainable:
            return False
        if not master.load(self._plan.layout, self.params, self.owned):
            return False
        self._binding.bind_stand_ins()
        self._guard.begin()
        return True

    def gather(self) -> None:
        """Start to bring the current values into `full`; `wait_gather` waits for them."""
        if self.state is _FREED:
            raise RuntimeError(f"the weights of {self.name} are gone: its engine was destroyed")
        if self.state is _RELEASED:
            with mark("gather", self.name):
                self._full.allocate()
                self._binding.bind_views()
                try:
                    self._publish()
                except BaseException:
                    self._drop_what_arrived()
                    raise

    def gather_for_others(self) -> None:
        """Take part in a gather that other ranks need, also if the values are here already."""
        if self.state is _RELEASED:
            self.gather()
            return
        with mark("gather", self.name):
            self.wait_gather()
            if not self._locks:
                self._publish()
            elif not self.is_whole:
                self._gather_aside()

    def refresh(self) -> None:
        """After an update of the master: bring the new values to every rank that holds the weights.

        A pending update of offloaded states is issued on the way; if the weights are released, by the next gather.
        """
        self.generation += 1
        if self._rest is not None:
            with mark("gather", self.name):
                self._rest.wait()
                target, axes = self._rest.buffer.tensor, self._rest.axes
                self._rest.arriving = self._fill(target, axes, f"{self.name} (new weights)")
        else:
            self._master.refresh(is_released=self.state is _RELEASED)
        if self.state is not _RELEASED:
            with mark("gather", self.name):
                self.wait_gather()
                self._publish()

    def wait_gather(self) -> None:
        """Order the compute stream after a gather in flight."""
        if self.state is _GATHERING:
            self._handle.wait()
            self._handle = DONE
            self._enter(_GATHERED)

    def wait_streams(self) -> None:
        """Order the compute stream after everything in flight."""
        self.wait_gather()
        self._drop_aside()
        if self._rest is not None:
            self._rest.wait()
        self._master.wait()

    def release(self) -> None:
        """Free `full`; the parameters become stand-ins. Not while they are locked, nor where it would free nothing:
        one rank in one dtype holds in `full` just what would rest."""
        if self._locks:
            self.resume_reading()
            return
        if self.state is _RELEASED or self.state is _FREED or self._frees_nothing:
            return
        # A gather in flight writes into `full`, which is memory of the compute stream: that waits before it is freed.
        self.wait_gather()
        with mark("release", self.name):
            self._binding.bind_stand_ins()
            if self._rest is None:
                self._master.leave_segment()
            self._full.free()
            self._enter(_RELEASED)

    @property
    def _frees_nothing(self) -> bool:
        return self.is_whole and self._master.frees_nothing

    def lock(self) -> bool:
        """Gather the values and keep them until `unlock`; returns whether this is in the middle of a pass."""
        self._locks += 1
        is_inside = self._on_read()
        self.gather()
        self.wait_gather()
        self.be_plain()
        return is_inside

    def begin_reading(self) -> None:
        """The user computes with the locked values, outside of a pass."""
        self._readers += 1
        self.resume_reading()

    def end_reading(self) -> None:
        self._readers -= 1
        if not self._readers:
            self.be_plain()

    def resume_reading(self) -> None:
        """No module uses the weights any more: if the user reads them, they are guarded."""
        is_released_later = self.policy.weights_sharded and not self._frees_nothing
        if self._readers and self.state is _GATHERED and not self.is_read and is_released_later:
            self.is_read = True
            self._guard.begin()

    def be_plain(self) -> None:
        """Make gathered parameters plain also if the user reads them: a module is about to use them."""
        if self.is_read:
            self.is_read = False
            self._guard.end()

    def need(self, generation: int) -> None:
        """A backward reads values that were saved in this generation: gather them if they are released."""
        if self.generation != generation:
            raise RuntimeError(
                f"the weights of {self.name} were changed between their use inside `with shardwise.gathered(...)` and "
                "the backward of it, so its gradients would be wrong: call engine.step() only after that backward"
            )
        if self.state is _RELEASED:
            self._on_read()
        self.wait_gather()
        if self.state is not _GATHERED:
            raise RuntimeError(f"the weights of {self.name} are {self.state.value}, and this backward reads them")

    @property
    def is_locked(self) -> bool:
        return self._locks > 0

    def unlock(self) -> None:
        self._locks -= 1
        self._drop_aside()
        if self.policy.weights_sharded:
            self.release()

    def whole(self, owned: torch.Tensor) -> torch.Tensor:
        """The flat tensor of the whole unit, from every rank's `owned` elements. A collective."""
        owned = owned.to(self._comm.device)
        if self.is_whole:
            return owned
        full = owned.new_empty(self._full.tensor.numel())
        full[self.owned.slice] = owned
        self._comm.gather(full, "control", self.name, AXES[self.policy.optim_cut]).wait()
        self._comm.confirm()
        return full

    def make_resident(self, states: UnitStates) -> None:
        """Move the master to the device, where all states rest from now on."""
        self.wait_streams()
        before = self._master
        if not isinstance(before, OffloadedMaster):
            before.rest_in(states)
            return
        self._master = make_master(self._plan, self.pieces, self._segment, states, self._ledger)
        values = before.values
        before.free()
        self._master.adopt(values, in_segment=self._rest is not None or self.state is not _RELEASED)

    def take_back(self, source: int | None = None) -> None:
        """Make what was written into `full` the master's value; `source` is the rank whose values all take."""
        self.wait_gather()
        if self.state is not _GATHERED:
            raise RuntimeError(f"the weights of {self.name} are {self.state.value}: what was written into them is lost")
        self._binding.reclaim()
        if source is not None:
            self._comm.broadcast(self._full.tensor, source, self.name)
        if self._rest is not None:
            self._rest.wait()
            self._rest.buffer.tensor.copy_(self._rest.place)
        self._master.write_back()
        self.generation += 1

    def rebound_error(self) -> ModelChangedError | None:
        """What to raise for a parameter to which the user has given other storage; None if there is none."""
        return self._binding.error()

    def was_written(self) -> torch.Tensor | None:
        """Whether others wrote into `full` in place, judged by a few elements of each parameter; None if unknown. No
        version counter shows a write through `param.data`, and an update would undo it."""
        if self.state is not _GATHERED or self._locks or self._binding.is_fake or not self.policy.trainable:
            return None
        return self._master.differs(self._places)

    @cached_property
    def _places(self) -> torch.Tensor:
        """Some elements of each parameter in this rank's segment, as indices into it."""
        return torch.tensor(self._plan.layout.samples(self.owned, 8), dtype=torch.int64, device=self._comm.device)

    def free(self) -> None:
        """Drop every buffer; the parameters become stand-ins."""
        self.wait_streams()
        self._binding.bind_stand_ins()
        self._master.free()
        self._full.leave()
        if self._rest is not None:
            self._rest.buffer.leave()
        self._enter(_FREED)

    @property
    def is_freed(self) -> bool:
        return self.state is _FREED

    @property
    def has_values(self) -> bool:
        """Whether the parameters can be read now, after a wait at most."""
        return self.state in (_GATHERING, _GATHERED)

    def gather_for_use(self) -> None:
        """A parameter is used by hand: gather the values in the middle of a pass, and wait for those on their way."""
        self._on_read()
        self.wait_gather()

    def _publish(self) -> None:
        """Fill this rank's part of `full`, and gather the others'."""
        if self._rest is None:
            self._handle = self._fill(self._full.tensor, self._axes, self.name)
        else:
            # On the stream of the gathers, not on the compute stream: that would wait here for the new weights.
            with self._comm.following(self._rest.arriving, "gather"):
                self._rest.place.copy_(self._rest.buffer.tensor)
                self._handle = self._comm.gather(self._full.tensor, "gather", self.name, self._axes)
        self._enter(_GATHERED if self._handle is DONE else _GATHERING)

    def _drop_what_arrived(self) -> None:
        """Values could not be read from where they rest: the next use reads them again."""
        if self.state is _RELEASED and isinstance(self._master, OffloadedMaster):
            if self._comm.device.type == "cuda":
                torch.cuda.synchronize(self._comm.device)  # copies into `full` may be in flight
            self._binding.bind_stand_ins()
            self._full.free()

    def _fill(self, target: torch.Tensor, axes: Sequence[Axis], name: str) -> Handle:
        """Fill the segment in `target`, and gather the rest of it."""
        arrival = self._master.fill_segment()
        if arrival is HERE:
            return self._comm.gather(target, "gather", name, axes)
        if self.is_whole:
            return arrival
        with arrival.following():
            return _Both(arrival, self._comm.gather(target, "gather", name, axes))

    def _gather_aside(self) -> None:
        """Take part in a gather in a buffer of its own: the user may have written into the locked values."""
        self._drop_aside()
        entry, full = Entry(Kind.WORK, self.name, Tier.DEVICE), self._full.tensor
        buffer = Buffer(self._ledger, entry, full.numel(), full.dtype, full.device)
        if self._rest is None:
            buffer.allocate()[self.owned.slice] = self._segment
        else:
            self._rest.wait()
            buffer.allocate()[self._rest.span.slice] = self._rest.buffer.tensor
        self._aside = buffer, self._comm.gather(buffer.tensor, "gather", self.name, self._axes)

    def _drop_aside(self) -> None:
        if self._aside is not None:
            (buffer, gathering), self._aside = self._aside, None
            gathering.wait()
            buffer.free()

    def _enter(self, state: WeightsState) -> None:
        """The one place where the state changes."""
        if state is self.state:
            return
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"the weights of {self.name} are {self.state.value} and cannot be {state.value}")
        if state is _GATHERED:
            self._guard.end()
        elif self.state is _GATHERED:
            self.is_read = False
            self._guard.begin()
        self.state = state


class _Both:
    """An arrival, and the gather that follows it."""

    def __init__(self, arrival: Arrival, gathering: Handle) -> None:
        self._handles = (arrival, gathering)

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()
