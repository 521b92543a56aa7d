"""What the engine asks of the ranks that train together: `Comm`, and the handle of a pending collective."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch

from shardwise.comm.model_group import Everyone, ModelGroup
from shardwise.comm.world_watch import WorldWatch
from shardwise.config.shape import AXES, Axis, NodeShape, Sharding
from shardwise.partition import Span

GATHER, REDUCE = CHANNELS = "gather", "reduce"  # sequences of operations, each in one order on all ranks
EVERYWHERE = AXES["sharded"]


class Handle(Protocol):
    """A pending collective."""

    def wait(self) -> Any: ...


class _Done:
    def wait(self) -> None:
        pass


DONE: Handle = _Done()


class Hop(NamedTuple):
    """An exchange or a gather over one axis: how many ranks it has, and the place of this one among them."""

    axis: Axis
    size: int
    place: int


@lru_cache
def _hops(shape: NodeShape, rank: int, axes: tuple[Axis, ...]) -> tuple[Hop, ...]:
    return tuple(Hop(axis, shape.size(axis), shape.place(axis, rank)) for axis in axes if shape.size(axis) > 1)


class Comm(ABC):
    """What the engine asks of the ranks of ZeRO: `ProcessGroupComm` sends, the plan's dry run only counts.

    rank, world_size  of this process in the group
    shape             the nodes of the group; without several, and with one rank in each, all ranks are one axis
    device            where the tensors of its operations are
    kernels           the kind of device that work is cut for: `device.type`, except in a dry run
    sent_bytes        bytes that this rank has sent, by kind
    axis_bytes        the same by axis, without control messages
    micro_step        the number of the micro-batch in its step: reductions of different ones are different operations
    model_group       the ranks that hold one copy of the model with this one, where tensor parallelism has cut it
    watch             on a mesh with other axes, the watch that stops this rank if one of their ranks is lost

    `unit` names the unit whose values an operation carries.
    """

    rank: int
    world_size: int
    shape: NodeShape
    device: torch.device
    kernels: str
    sent_bytes: Counter[str]
    axis_bytes: Counter[str]
    micro_step: int
    model_group: ModelGroup = ModelGroup()
    watch: WorldWatch | None = None

    runs_ahead = False
    """Whether the device orders operations: then what follows a collective can be issued before it has ended."""

    @property
    def everyone(self) -> Everyone:
        """All ranks: those of this group, and those of their model groups."""
        return Everyone(self)

    @property
    def shard_index(self) -> int:
        """Which of the W shards this rank owns."""
        return self.shape.shard_index(self.rank)

    def part(self, numel: int, sharding: Sharding) -> Span:
        """What this rank holds of `numel` elements that are cut as `sharding` says."""
        size = numel // self.shape.parts(sharding)
        start = self.shape.part_index(sharding, self.rank) * size
        return Span(start, start + size)

    def hops(self, axes: Sequence[Axis] = EVERYWHERE) -> Sequence[Hop]:
        """The steps of a reduction over `axes`; those of a gather are the same backwards."""
        return _hops(self.shape, self.rank, tuple(axes))

    @contextlib.contextmanager
    def following(self, handle: Handle, channel: str = REDUCE) -> Iterator[None]:
        """What is issued inside, in `channel`, runs after the operation of `handle` and after all that this thread has
        issued so far; where `runs_ahead`, it overlaps what the thread computes next."""
        handle.wait()
        yield

    @abstractmethod
    def gather(self, full: torch.Tensor, kind: str, unit: str = "", axes: Sequence[Axis] = EVERYWHERE) -> Handle:
        """Fill `full` from all ranks of the axes; each rank provides its own part of it, in place."""

    @abstractmethod
    def rows_received(self, hop: Hop) -> int:
        """How many rows `exchange` receives: those of all ranks of the axis, of all others, or their mean alone."""

    @abstractmethod
    def exchange(
        self, received: torch.Tensor, sent: torch.Tensor, kind: str, unit: str, hop: Hop
    ) -> tuple[Handle, list[torch.Tensor]]:
        """Send row w of `sent` to the rank at place w of the axis. The list is every rank's row for this one, in their
        order, once the handle is done.

        `received` has `rows_received` rows. With one row fewer than ranks, this rank's own row is that of `sent`. Where
        the backend itself reduces, the list is one row, their mean.
        """

    @abstractmethod
    def blocks(self, tensor: torch.Tensor, block_numel: int) -> Sequence[torch.Tensor]:
        """A long tensor in parts that are processed one after the other."""

    @abstractmethod
    def share(self, values: torch.Tensor, name: str = "norm", channel: str = REDUCE) -> torch.Tensor:
        """A few values of every rank, on every rank: shape [W, *values.shape]. A control message, ordered among the
        operations of one channel."""

    def read(self, shared: torch.Tensor) -> torch.Tensor:
        """Values that ranks have shared, on the host. An operation that a rank's death broke off raises the reason: on
        a device it ends like any other, with anything in place of the values."""
        return shared.cpu()

    def confirm(self) -> None:
        """Before values leave the engine: wait for the device, and raise the reason if it ended operations that were
        broken off, whose values may be anything."""

    @abstractmethod
    def share_object(self, value: Any, name: str = "object", channel: str = "reduce") -> list[Any]:
        """A small picklable value of every rank, on every rank. It synchronizes, so a step does not use it."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int = 0, unit: str = "") -> None:
        """Copy rank `source`'s values to every rank, and wait. Used at start-up and by writes, not in a step."""

    @abstractmethod
    def note(self, what: str) -> None:
        """Record an event that sends nothing but must happen on all ranks or on none, such as an interrupted pass."""

    @contextlib.contextmanager
    def announced(self) -> Iterator[None]:
        """Around operations that follow on all ranks from what the operation before sent to all of them."""
        yield

    def name_units(self, names: Sequence[str]) -> None:
        """Tell the units of the model, in an order that is the same on all ranks: passes go from one to the next."""

    @property
    @abstractmethod
    def is_checked(self) -> bool:
        """Whether operations are checked for agreement with other ranks."""

    @property
    def has_failed(self) -> bool:
        """Whether the ranks cannot continue, because one of them is gone or does something else."""
        return False

    @abstractmethod
    def begin_close(self) -> None:
        """From here on, an operation that cannot finish is dropped without an error."""

    @abstractmethod
    def close(self) -> None:
        """Release the process groups."""

    def _count(self, kind: str, size_bytes: int, hop: Hop | None = None) -> None:
        """Count what this rank sends of `size_bytes` over an axis, or over all ranks in a control message."""
        size = hop.size if hop is not None else self.world_size
        sent = size_bytes * (size - 1) // size
        self.sent_bytes[kind] += sent
        if hop is not None and kind != "control":
            self.axis_bytes[hop.axis] += sent
