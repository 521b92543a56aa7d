"""The master: the elements of a unit that this rank updates, in the dtype that is updated, wherever they rest.

Their first values come from the model, or from the *origin* of a parameter that was built without any (`read_values`).

`Weights` fills the part of the unit's full buffer that this rank owns (the *segment*) from the master, through one
interface. The optimizer's parameters are *master pieces*: one flat tensor for each parameter group, or each tensor in
its own shape where the optimizer needs whole ones (`Layout.updates`).

    SharedMaster     on the device; weights and master have one dtype. It lies in the segment while the full buffer is
                     allocated and moves to a buffer of its own when that is released: no element is held twice
    SeparateMaster   on the device, in a buffer of its own; the segment gets a cast of it
    OffloadedMaster  on the host or a disk; the segment is filled from there
    MirroredMaster   on the host or a disk, with a copy of the weights of this rank's shard on the device

Weights that a rank holds in addition to its master, and does not update, are a `RestingPart`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from shardwise.comm import DONE, Comm, Handle
from shardwise.config.shape import Axis
from shardwise.memory import Buffer, Entry, Kind, Ledger, Tier
from shardwise.offload.offloaded_states import OffloadedStates
from shardwise.offload.unit_states import HERE, MASTER, Arrival, UnitStates
from shardwise.partition import Layout, Span
from shardwise.partition.dtensors import local
from shardwise.partition.layout import GroupRun
from shardwise.unit.plan import UnitPlan

ORIGIN = "_shardwise_origin"
"""The attribute of a parameter that is built without values (see `deferred`): a function of a part of its flat elements
that returns the values there."""
SHARED_ORIGIN = "_shardwise_shared_origin"
"""The same for values that the ranks hold together: a function that returns all flat elements. A collective."""


def read_values(flat: torch.Tensor, plan: UnitPlan, params: Sequence[torch.Tensor], comm: Comm) -> None:
    """Fill `flat` with the first values of a unit, rank 0's on all ranks. A collective.

    From origins a rank reads only what it holds of the weights. Origins are used once.
    """
    needed, slots = comm.part(flat.numel(), plan.policy.weights_cut), plan.layout.slots
    has_origins = any(hasattr(param, ORIGIN) or hasattr(param, SHARED_ORIGIN) for param in params)
    for slot, param in zip(slots, params, strict=True):
        origin, shared = param.__dict__.pop(ORIGIN, None), param.__dict__.pop(SHARED_ORIGIN, None)
        if shared is not None:
            flat[slot.span.slice].copy_(shared())
        elif origin is None:
            flat[slot.span.slice].copy_(local(param).detach().reshape(-1))
        elif part := slot.span.intersect(needed):
            flat[part.slice].copy_(origin(part.shift(-slot.span.start)))
    for slot in slots:
        if slot.spec.part is not None and slot.spec.part.dim is None:
            comm.model_group.broadcast(flat[slot.span.slice])
    if not has_origins:
        comm.broadcast(flat, unit=plan.name)


class MasterPiece(NamedTuple):
    """A parameter of the optimizer: elements `span` of those that this rank owns, in `shape`, all of one group."""

    group: int
    param: nn.Parameter
    span: Span
    shape: tuple[int, ...]


def pieces_of(runs: Sequence[GroupRun]) -> list[MasterPiece]:
    """A master piece for each run of elements; the master binds their values."""
    return [
        MasterPiece(run.group, nn.Parameter(torch.empty(0)), run.shard, run.shape or (run.shard.numel,)) for run in runs
    ]


@dataclass
class RestingPart:
    """Weights that a rank holds and does not update: its node's part, where the masters are sharded over all ranks.

    They are the elements `span`, whose place in the full buffer is `place`; the master's segment is a part of them. An
    update is followed by a gather of the new weights over the other nodes, along `axes`, into this part, and `arriving`
    is that gather until it has ended. A use of the unit is followed by a gather over the node, into the full buffer.
    """

    span: Span
    buffer: Buffer
    place: torch.Tensor
    axes: Sequence[Axis]
    arriving: Handle = DONE

    def wait(self) -> None:
        self.arriving.wait()
        self.arriving = DONE


class Master(ABC):
    """The master of one unit; `segment` is the place of its elements in the full buffer."""

    frees_nothing = False
    """Whether releasing the full buffer of a unit that one rank owns alone would free nothing."""

    def __init__(self, pieces: list[MasterPiece], segment: torch.Tensor) -> None:
        self.pieces = pieces
        self._segment = segment

    @property
    @abstractmethod
    def values(self) -> torch.Tensor:
        """The current values. Off the device, this blocks the host until they are there."""

    @abstractmethod
    def adopt(self, values: torch.Tensor, in_segment: bool) -> None:
        """Take the first values; `in_segment` says that the segment holds them as well."""

    @abstractmethod
    def fill_segment(self) -> Arrival:
        """Bring the values into the segment, after a pending update."""

    @abstractmethod
    def write_back(self) -> None:
        """Make what was written into the segment the master's value. Unchanged elements keep every bit."""

    def differs(self, places: torch.Tensor) -> torch.Tensor | None:
        """Whether others have written to the segment at `places`, on the device; None where this cannot be known."""
        return None

    def rest_in(self, states: UnitStates) -> None:
        """The moments rest elsewhere from now on."""

    def leave_segment(self) -> None:
        """The full buffer is about to be freed."""

    def refresh(self, is_released: bool) -> None:
        """The master was written, or its update is pending; `is_released` says that there is no full buffer."""

    def wait(self) -> None:
        """Order the compute stream after what is in flight."""

    def free(self) -> None:
        """Drop the values."""
        for piece in self.pieces:
            piece.param.data = torch.empty(0)

    def cut(self, owned: torch.Tensor) -> list[torch.Tensor]:
        """A flat tensor of the owned elements as the pieces of it."""
        if len(self.pieces) == 1 and self.pieces[0].shape == owned.shape:
            return [owned.view(-1)]
        return [owned[piece.span.slice].view(piece.shape) for piece in self.pieces]

    def bind(self) -> None:
        """Point the pieces at the values."""
        for piece, value in zip(self.pieces, self.cut(self.values), strict=True):
            piece.param.data = value


class SeparateMaster(Master):
    """A master of another dtype than the weights."""

    def __init__(self, pieces: list[MasterPiece], segment: torch.Tensor, buffer: Buffer) -> None:
        super().__init__(pieces, segment)
        self._buffer = buffer

    @property
    def values(self) -> torch.Tensor:
        return self._buffer.tensor

    def adopt(self, values: torch.Tensor, in_segment: bool) -> None:
        self._buffer.allocate().copy_(values)
        self.bind()

    def fill_segment(self) -> Arrival:
        self._segment.copy_(self._buffer.tensor)
        return HERE

    def write_back(self) -> None:
        self._buffer.tensor.copy_(_rewritten(self._buffer.tensor, self._segment))

    def differs(self, places: torch.Tensor) -> torch.Tensor:
        weights, exact = self._segment[places].to(self._buffer.tensor.dtype), self._buffer.tensor[places]
        rounding = torch.finfo(self._segment.dtype).eps
        return (weights.isfinite() & ~torch.isclose(weights, exact, rtol=rounding, atol=1e-6)).any()

    def free(self) -> None:
        super().free()
        self._buffer.free()


class SharedMaster(Master):
    """A master that is the weights of its elements. Its moments may rest off the device."""

    frees_nothing = True

    def __init__(self, pieces: list[MasterPiece], segment: torch.Tensor, buffer: Buffer, states: UnitStates) -> None:
        super().__init__(pieces, segment)
        self._buffer = buffer
        self._states = states
        self._updating: Handle = DONE

    @property
    def values(self) -> torch.Tensor:
        return self._buffer.tensor if self._buffer.live else self._segment

    def adopt(self, values: torch.Tensor, in_segment: bool) -> None:
        if not in_segment:
            self._buffer.allocate().copy_(values)
        self.bind()

    def fill_segment(self) -> Arrival:
        if self._buffer.live:
            self.wait()
            self._segment.copy_(self._buffer.tensor)
            self._buffer.free()  # it is memory of the compute stream, as the copy is work of it
            self.bind()
        return self._update()

    def leave_segment(self) -> None:
        self._buffer.allocate().copy_(self._segment)
        self.bind()

    def refresh(self, is_released: bool) -> None:
        if is_released and self._states.pending is not None:
            self.wait()
            self._updating = self._update()

    def _update(self) -> Arrival:
        """Issue a pending update, which changes the values where they are."""
        if isinstance(self._states, OffloadedStates) and self._states.pending is not None:
            return self._states.transfer(None)
        return HERE

    def write_back(self) -> None:
        pass  # what was written is the master

    def rest_in(self, states: UnitStates) -> None:
        self._states = states

    def wait(self) -> None:
        self._updating.wait()
        self._updating = DONE

    def free(self) -> None:
        super().free()
        self._buffer.free()


class OffloadedMaster(Master):
    """A master that rests on the host or on a disk."""

    def __init__(self, pieces: list[MasterPiece], segment: torch.Tensor, states: OffloadedStates) -> None:
        super().__init__(pieces, segment)
        self._states = states

    @property
    def values(self) -> torch.Tensor:
        return self._states.read(MASTER, self._states.everything)

    def adopt(self, values: torch.Tensor, in_segment: bool) -> None:
        self._states.write(MASTER, self._states.everything, values)
        self.bind()

    def load(self, layout: Layout, params: Sequence[torch.Tensor], owned: Span) -> bool:
        """Read the owned elements from the origins of the parameters to where they rest; False if a parameter has
        none."""
        if not all(hasattr(param, ORIGIN) for param in params):
            return False
        for slot, param in zip(layout.slots, params, strict=True):
            origin = param.__dict__.pop(ORIGIN)
            if part := slot.span.intersect(owned):
                self._states.storages[MASTER].load(part.shift(-owned.start), origin, part.shift(-slot.span.start))
        return True

    def fill_segment(self) -> Arrival:
        return self._states.transfer(self._segment)

    def write_back(self) -> None:
        written = _rewritten(self.values.to(self._segment.device), self._segment)
        self._states.write(MASTER, self._states.everything, written)

    def bind(self) -> None:
        storage = self._states.storages[MASTER]
        for piece in self.pieces:
            piece.param.data = storage.at_rest(piece.span, torch.Size(piece.shape))


class MirroredMaster(OffloadedMaster):
    """An offloaded master, and on the device the weights of this rank's shard, which the segment is filled from."""

    def __init__(
        self, pieces: list[MasterPiece], segment: torch.Tensor, states: OffloadedStates, weights: Buffer
    ) -> None:
        super().__init__(pieces, segment, states)
        self._weights = weights
        self._renewing: Handle = DONE

    def adopt(self, values: torch.Tensor, in_segment: bool) -> None:
        super().adopt(values, in_segment)
        self._weights.allocate().copy_(values)

    def fill_segment(self) -> Arrival:
        self.wait()
        self._segment.copy_(self._weights.tensor)
        return HERE

    def refresh(self, is_released: bool) -> None:
        self.wait()
        self._renewing = self._states.transfer(self._weights.tensor)

    def write_back(self) -> None:
        super().write_back()
        self._weights.tensor.copy_(self._segment)

    def wait(self) -> None:
        self._renewing.wait()
        self._renewing = DONE

    def free(self) -> None:
        super().free()
        self._weights.free()


def make_master(
    plan: UnitPlan, pieces: list[MasterPiece], segment: torch.Tensor, states: UnitStates, ledger: Ledger
) -> Master:
    """The master of a unit whose states rest in `states`."""
    policy = plan.policy

    def buffer(kind: Kind, dtype: torch.dtype) -> Buffer:
        return Buffer(ledger, Entry(kind, plan.name, Tier.DEVICE), plan.owned_numel, dtype, segment.device)

    if isinstance(states, OffloadedStates) and MASTER in states:
        if policy.weights_sharded and policy.weights_tier == "device" and not policy.weights_rest_apart:
            return MirroredMaster(pieces, segment, states, buffer(Kind.WEIGHTS, policy.weight_dtype))
        return OffloadedMaster(pieces, segment, states)
    if policy.weight_dtype == policy.master_dtype:
        return SharedMaster(pieces, segment, buffer(Kind.WEIGHTS, policy.master_dtype), states)
    return SeparateMaster(pieces, segment, buffer(Kind.OPTIM, policy.master_dtype))


def _rewritten(master: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The master with the elements replaced whose weights are no longer its cast."""
    return torch.where(weights == master.to(weights.dtype), master, weights.to(master.dtype))
