"""The weights of a unit: what rests, what computes, and the gather and release between them.

Names, used throughout:
- *full*: the unit's flat buffer in the dtype that computes; the parameters of the model are views of it.
- *master*: the elements this rank owns, in the dtype that is updated (its shard, or everything where the optimizer is
  replicated). *master pieces*: one flat tensor per optimizer group over the master, or each tensor in its own shape
  where the optimizer needs whole ones (`Layout.updates`); the optimizer's parameters.
- *part*: the master's own storage. Where master and weights have one dtype, the master lives in its slot of `full`
  while that exists and moves to `part` when it is released, so that no element is ever held twice.
- *states*: where the master rests if not on the device; `full` is then filled from there.
- *stand-in*: what a parameter points to while released: NaN expanded to its shape. Reads give NaN, writes raise.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.comm.comm import DONE, Comm, Handle
from shardwise.memory.ledger import Buffer, Entry, Kind, Ledger, Tier
from shardwise.offload.unit_states import MASTER, UnitStates
from shardwise.partition.layout import Layout, Span
from shardwise.partition.policy import Policy
from shardwise.profiling import mark
from shardwise.unit import param_guard
from shardwise.unit.deferred_value import origin_of, set_origin


class WeightsState(enum.Enum):
    """RELEASED: stand-ins. GATHERING: a collective fills `full`. READY: the parameters hold the current values."""

    RELEASED = "released"
    GATHERING = "gathering"
    READY = "ready"


class Weights:
    """The weights of one unit."""

    def __init__(
        self,
        name: str,
        params: Sequence[nn.Parameter],
        layout: Layout,
        policy: Policy,
        comm: Comm,
        ledger: Ledger,
        states: UnitStates | None = None,
    ) -> None:
        self.name = name
        self.policy = policy
        self.params = list(params)
        self.state = WeightsState.RELEASED
        self.generation = 0
        self.on_read: Callable[[], None] = lambda: None
        self._pins = 0
        self._watch = param_guard.ParamGuard(self.params, self)
        self.owned = layout.shard(comm.rank) if policy.optim_sharded else Span(0, layout.numel)
        self.is_whole = self.owned.numel == layout.numel
        """Whether this rank owns every element, so that nothing need be gathered."""
        self._comm = comm
        self._handle: Handle = DONE
        self._keeping: Handle = DONE
        self._aside: tuple[Buffer, Handle] | None = None
        self._one_storage = policy.weight_dtype == policy.master_dtype
        self._full = Buffer(
            ledger, Entry(Kind.WEIGHTS, name, Tier.DEVICE), layout.numel, policy.weight_dtype, comm.device
        )
        self._states = states
        self._ledger = ledger
        self._master_is_offloaded = states is not None and MASTER in states
        # What rests on the device beside a master that does not: sharded weights, where they are placed there.
        self._keeps_weights = self._master_is_offloaded and policy.weights_sharded and policy.weights_tier == "device"
        kind = Kind.WEIGHTS if self._one_storage or self._keeps_weights else Kind.OPTIM
        dtype = policy.weight_dtype if self._keeps_weights else policy.master_dtype
        self._part = Buffer(ledger, Entry(kind, name, Tier.DEVICE), self.owned.numel, dtype, comm.device)
        self._views = self._full.views(layout)
        self._mine = self._full.view(self.owned)
        blank = _blank(policy.weight_dtype, comm.device)
        self._stand_ins = [blank.expand(slot.spec.shape) for slot in layout.slots]
        runs = layout.updates(comm.rank if policy.optim_sharded else None) if policy.trainable else ()
        if states is not None:
            runs = tuple(part for run in runs for part in run.split(states.offload.bucket_numel))
            states.divide([run.shard for run in runs])
        self.piece_spans = [run.shard for run in runs]
        self._piece_shapes = [(run.shard.numel,) if run.shape is None else run.shape for run in runs]
        self.pieces = [(run.group, nn.Parameter(torch.empty(0))) for run in runs]

    @property
    def master(self) -> torch.Tensor:
        """The owned elements as they are updated, wherever they are, to look at. Off the device, it waits for them."""
        if (states := self.master_states) is not None:
            return states.read(MASTER, states.everything)
        return self._part.tensor if self._part.live else self._mine

    @property
    def master_states(self) -> UnitStates | None:
        """Where the master rests, if not on the device."""
        return self._states if self._master_is_offloaded else None

    @property
    def full(self) -> torch.Tensor:
        """The flat weights; settled first."""
        self.settle()
        assert self.state is WeightsState.READY, f"the weights of {self.name} are {self.state.value}"
        return self._full.tensor

    @property
    def storage_id(self) -> int:
        """What tells the storage of `full` from others, also while it is freed."""
        return int(self._full.tensor.untyped_storage()._cdata)

    @property
    def full_bytes(self) -> int:
        """What the unit takes while it is gathered."""
        return self._full.size_bytes

    def adopt(self) -> None:
        """Take the model's values, rank 0's for all, and come to rest.

        Parameters that were built without values have an origin instead, from which each rank takes what it needs.
        """
        # Rank 0's values go out in the master's dtype: a 16-bit copy would lose what the master must keep.
        if self._one_storage:
            exact = self._full.allocate().zero_()
        else:
            exact = torch.zeros(self._full.tensor.numel(), dtype=self.policy.master_dtype, device=self._comm.device)
        base = self._full.tensor.storage_offset()
        needed = self.owned if self.policy.weights_sharded else Span(0, exact.numel())
        is_shared = not any(origin_of(param) for param in self.params)
        for param, view in zip(self.params, self._views, strict=True):
            start = int(view.storage_offset() - base)
            slot, origin = Span(start, start + view.numel()), origin_of(param)
            if origin is None:
                exact[slot.slice].copy_(param.detach().reshape(-1))
            elif part := slot.intersect(needed):
                exact[part.slice].copy_(origin.read(part.shift(-start)))
            set_origin(param, None)
        if is_shared:
            self._comm.broadcast(exact, unit=self.name)
        if (states := self.master_states) is not None:
            states.write(MASTER, states.everything, exact[self.owned.slice])
        elif not self._one_storage:
            self._part.allocate().copy_(exact[self.owned.slice])
        if not self._one_storage:
            self._full.allocate().copy_(exact)
        if self._keeps_weights:
            self._part.allocate().copy_(self._mine)
        self._bind(self._views)
        self.bind_pieces()
        self.state = WeightsState.READY
        if self.policy.weights_sharded:
            self.release()

    def gather(self) -> None:
        """Start to bring the current values into `full`; `settle` waits for them."""
        if self.state is WeightsState.RELEASED:
            with mark("gather", self.name):
                self._full.allocate()
                self._watch.end()
                self._bind(self._views)
                self._publish()

    def gather_again(self) -> None:
        """Take part in a gather that other ranks need, also if the values are here: they come once more."""
        if self.state is WeightsState.RELEASED:
            self.gather()
            return
        with mark("gather", self.name):
            self.settle()
            if not self._pins:
                self._publish()
            elif not self.is_whole:
                self._gather_aside()

    def refresh(self) -> None:
        """After an update of the master: bring the new values to whoever holds the weights.

        An update of states that rest elsewhere is done on the way; where nobody holds the weights, at the next gather.
        """
        self.generation += 1
        rests_here = self._keeps_weights or (self.state is WeightsState.RELEASED and not self._master_is_offloaded)
        # A copy that rests beside its master is renewed also where the master was written and no update is due.
        if self._states is not None and rests_here and (self._keeps_weights or self._states.job is not None):
            self._keeping.wait()
            self._keeping = self._states.deliver(self._part.tensor)
        if self.state is not WeightsState.RELEASED:
            with mark("gather", self.name):
                self.settle()
                self._publish()

    def settle(self) -> None:
        """Wait for a gather under way."""
        if self.state is WeightsState.GATHERING:
            self._handle.wait()
            self._handle = DONE
            self._watch.end()
            self.state = WeightsState.READY

    def catch_up(self) -> None:
        """Have the computing stream come after everything that is under way."""
        self.settle()
        self._drop_aside()
        self._keeping.wait()
        self._keeping = DONE

    def release(self) -> None:
        """Free `full`; the parameters become stand-ins. Not while they are pinned, nor where it would free nothing:
        one rank in one dtype holds in `full` just what would rest."""
        frees_nothing = self._one_storage and self.is_whole and not self._master_is_offloaded
        if self.state is WeightsState.RELEASED or self._pins or frees_nothing:
            return
        self.settle()
        with mark("release", self.name):
            self._bind(self._stand_ins)
            self._watch.begin()
            if self._one_storage and not self._master_is_offloaded:
                self._part.allocate().copy_(self._mine)
                self.bind_pieces()
            self._full.free()
            self.state = WeightsState.RELEASED

    def pin(self) -> None:
        """Make the values ready and keep them until `unpin`."""
        self._pins += 1
        self.on_read()
        self.gather()
        self.settle()

    def unpin(self) -> None:
        self._pins -= 1
        self._drop_aside()
        if self.policy.weights_sharded:
            self.release()

    def whole(self, owned: torch.Tensor) -> torch.Tensor:
        """The flat tensor of the whole unit of which every rank brings its `owned` elements. A collective."""
        owned = owned.to(self._comm.device)
        if self.is_whole:
            return owned
        full = owned.new_empty(self._full.tensor.numel())
        full[self.owned.slice] = owned
        self._comm.gather(full, "control", self.name).wait()
        return full

    def move_in(self) -> None:
        """Let the master rest on the device."""
        self.catch_up()
        if not self._master_is_offloaded:
            return
        master = self.master
        self._part.free()
        kind = Kind.WEIGHTS if self._one_storage else Kind.OPTIM
        entry = Entry(kind, self.name, Tier.DEVICE)
        self._part = Buffer(self._ledger, entry, self.owned.numel, self.policy.master_dtype, self._comm.device)
        if not self._one_storage or self.state is WeightsState.RELEASED:
            self._part.allocate().copy_(master)
        self._master_is_offloaded = self._keeps_weights = False
        self._states = None
        self.bind_pieces()

    def take_back(self, source: int | None = None) -> None:
        """Make what was written into `full` the master's value; `source` is the rank whose writing counts.

        Untouched elements keep every bit of their master.
        """
        if source is not None:
            self._comm.broadcast(self.full, source, self.name)
        mine = self.full[self.owned.slice]
        if not self._one_storage or self._master_is_offloaded:
            master = self.master.to(mine.device)
            same = mine == master.to(mine.dtype)
            written = torch.where(same, master, mine.to(master.dtype))
            if (states := self.master_states) is not None:
                states.write(MASTER, states.everything, written)
            else:
                self.master.copy_(written)
        if self._keeps_weights:
            self._part.tensor.copy_(mine)
        self.generation += 1

    def free(self) -> None:
        """Drop every buffer; the parameters become stand-ins."""
        self.catch_up()
        if self.state is WeightsState.RELEASED:
            self._watch.end()
        self._bind(self._stand_ins)
        for _, piece in self.pieces:
            piece.data = torch.empty(0)
        self._full.free()
        self._part.free()
        self.state = WeightsState.RELEASED

    def _publish(self) -> None:
        if self._states is not None and (
            self._states.job is not None or (self._master_is_offloaded and not self._part.live)
        ):
            self._publish_offloaded(self._states)
            return
        if self._part.live:
            self._keeping.wait()
            self._mine.copy_(self._part.tensor)
            if self._one_storage:
                self._part.free()
                self.bind_pieces()
        if self.is_whole:
            self.state = WeightsState.READY
            return
        self._expect(self._comm.gather(self._full.tensor, "gather", self.name))

    def _gather_aside(self) -> None:
        """Let values go past those held here, into which somebody may have written."""
        self._drop_aside()
        entry = Entry(Kind.WORK, self.name, Tier.DEVICE)
        full = self._full.tensor
        aside = Buffer(self._ledger, entry, full.numel(), full.dtype, full.device)
        aside.allocate()[self.owned.slice] = self._mine
        self._aside = aside, self._comm.gather(aside.tensor, "gather", self.name)

    def _drop_aside(self) -> None:
        if self._aside is not None:
            (aside, gathering), self._aside = self._aside, None
            gathering.wait()
            aside.free()

    def _publish_offloaded(self, states: UnitStates) -> None:
        arrival = states.deliver(self._mine)
        if self.is_whole:
            self._expect(arrival)
            return
        arrival.issue()
        with states.offload.streams.update:
            gathering = self._comm.gather(self._full.tensor, "gather", self.name)
        self._expect(_Both(arrival, gathering))

    def _expect(self, handle: Handle) -> None:
        self._handle = handle
        self.state = WeightsState.GATHERING
        self._watch.begin()

    def react(self, func: Callable[..., Any]) -> None:
        """A parameter that is not ready is used by hand: in the middle of a forward, `on_read` gathers it."""
        if self.state is WeightsState.RELEASED and param_guard.writes(func):
            raise RuntimeError(
                f"a parameter of {self.name} is sharded and not gathered, so {func.__name__} would write nowhere: "
                "write inside `with shardwise.gathered(params, write=True):`"
            )
        self.on_read()
        self.settle()

    def _bind(self, tensors: Sequence[torch.Tensor]) -> None:
        for param, tensor in zip(self.params, tensors, strict=True):
            param.data = tensor

    def bind_pieces(self) -> None:
        """Let the optimizer's parameters be where the master is."""
        if (states := self.master_states) is None:
            values = self.cut(self.master)
        else:
            places = zip(self.piece_spans, self._piece_shapes, strict=True)
            values = [states.storages[MASTER].at_rest(span, torch.Size(shape)) for span, shape in places]
        for (_, piece), value in zip(self.pieces, values, strict=True):
            piece.data = value

    def cut(self, owned: torch.Tensor) -> list[torch.Tensor]:
        """A flat tensor of the owned elements as the optimizer's pieces of it."""
        if self._piece_shapes == [owned.shape]:
            return [owned.view(-1)]
        return [owned[s.slice].view(shape) for s, shape in zip(self.piece_spans, self._piece_shapes, strict=True)]


def _blank(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device)


class _Both:
    """A delivery, and the gather that follows it."""

    def __init__(self, arrival: Handle, gathering: Handle) -> None:
        self._handles = (arrival, gathering)

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()
