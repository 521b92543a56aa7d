"""The ranks of a dry run: one alone, which counts what it would send, in groups that send nothing."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm import DONE, Comm, Handle, Hop
from shardwise.comm.interface import EVERYWHERE, REDUCE
from shardwise.comm.model_group import ModelGroup
from shardwise.config.shape import Axis, NodeShape, shape_of
from shardwise.errors import ConfigError
from shardwise.timing.tape import Mark, Tape, Uses

_MOST_ROWS = 8
"""A dry run adds up at most this many of the rows of a reduction."""


class DryComm(Comm):
    """One rank of `world_size`, alone: it counts what it would send, and leaves as it is what it would receive."""

    def __init__(self, rank: int, ranks: int | NodeShape, kernels: str, tape: Tape | None = None) -> None:
        self.device = torch.device("cpu")
        self.kernels = kernels
        self.rank = rank
        self.shape = shape_of(ranks)
        self.world_size = self.shape.world_size
        self.sent_bytes = Counter()
        self.axis_bytes = Counter()
        self.micro_step = 0
        self._sends_directly = kernels == "cpu"
        self._tape = tape or Tape()
        self._rows_each = 1.0

    def gather(self, full: torch.Tensor, kind: str, unit: str = "", axes: Sequence[Axis] = EVERYWHERE) -> Handle:
        size_bytes, sizes = full.nbytes, list[tuple[Hop, int]]()
        for hop in self.hops(axes):
            self._count(kind, size_bytes, hop)
            sizes.insert(0, (hop, size_bytes))
            size_bytes //= hop.size
        mark: Mark | None = None
        for hop, each in sizes if full.numel() else ():
            mark = self._tape.send("gather", "gather", each, hop.size, hop.axis, mark, Uses((full,), (full,)))
        return mark or DONE

    @contextlib.contextmanager
    def following(self, handle: Handle, channel: str = REDUCE) -> Iterator[None]:
        if self._sends_directly:
            handle.wait()
            yield
            return
        issued = self._tape.mark()
        with self._tape.on(channel):
            handle.wait()
            issued.wait()
            yield

    def rows_received(self, hop: Hop) -> int:
        return hop.size - self._sends_directly

    def exchange(
        self, received: torch.Tensor, sent: torch.Tensor, kind: str, unit: str, hop: Hop
    ) -> tuple[Handle, list[torch.Tensor]]:
        """Two rows are those of all ranks; this rank's own row is among them where it decides how sums are made.

        `test_the_peak_is_the_measured_one` with three ranks fails otherwise.
        """
        self._count(kind, sent.nbytes, hop)
        if self._sends_directly:
            rows = [*[received[0]] * min(hop.place, 2), sent[hop.place], received[-1]]
        else:
            rows = [received[row % 2] for row in range(min(hop.size, _MOST_ROWS))]
        self._rows_each = hop.size / len(rows)
        uses = Uses((sent,), (received,))
        mark = self._tape.send("reduce", "reduce", sent.nbytes, hop.size, hop.axis, uses=uses)
        return mark or DONE, rows

    def blocks(self, tensor: torch.Tensor, block_numel: int) -> Sequence[torch.Tensor]:
        """One block represents all: they use the same memory, one after the other."""
        if not tensor.numel():
            return ()
        return _OneBlock(tensor[:block_numel], -(-tensor.numel() // block_numel) * self._rows_each, self._tape)

    def share(self, values: torch.Tensor, name: str = "", channel: str = "") -> torch.Tensor:
        if self.world_size == 1:
            return values.unsqueeze(0)
        axis: Axis = "outer" if self.shape.nodes > 1 else "inner"
        everyone = values.new_empty(self.world_size, *values.shape)
        uses = Uses((values,), (everyone,))
        sent = self._tape.send(channel or REDUCE, "share", everyone.nbytes, self.world_size, axis, uses=uses)
        (sent or DONE).wait()
        return everyone

    def share_object(self, value: Any, name: str = "", channel: str = "") -> list[Any]:
        return [value] * self.world_size

    def broadcast(self, tensor: torch.Tensor, source: int = 0, unit: str = "") -> None:
        pass

    def note(self, what: str) -> None:
        pass

    @property
    def is_checked(self) -> bool:
        return False

    def begin_close(self) -> None:
        pass

    def close(self) -> None:
        pass


class _OneBlock(list[torch.Tensor]):
    """A block that represents `times` blocks: the tape counts each operation on it that many times."""

    def __init__(self, block: torch.Tensor, times: float, tape: Tape) -> None:
        super().__init__([block])
        self._times, self._tape = times, tape

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._tape.times = self._times
        yield from super().__iter__()
        self._tape.times = 1.0


class DryModelGroup(ModelGroup):
    """The first of `size` ranks, alone: it leaves as it is what it would receive."""

    def share(self, values: torch.Tensor) -> torch.Tensor:
        return values[None] if self.size == 1 else values.new_empty(self.size, *values.shape)

    def share_object(self, value: Any) -> list[Any]:
        return [value] * self.size

    def broadcast(self, tensor: torch.Tensor) -> None:
        pass


@dataclass(frozen=True)
class PipelineRank:
    """One of `pp` ranks of a pipeline that runs a step in `micro_batches` by a schedule of torch's."""

    pp: int
    rank: int
    schedule: str
    micro_batches: int
    keep_gathered: bool = False


@contextlib.contextmanager
def model_axes(tp: int, at: PipelineRank | None) -> Iterator[tuple[Any, ModelGroup]]:
    """A mesh of `tp` ranks, or None, and the group of the pipeline; this process is one rank of both, in groups that
    send nothing."""
    pp, place = (at.pp, at.rank) if at is not None else (1, 0)
    size = tp * pp
    if size == 1:
        yield None, ModelGroup()
        return
    if dist.is_initialized():
        raise ConfigError(
            f"a dry run of a model on {size} ranks needs a process group of its own: run it before "
            "torch.distributed.init_process_group, or in another process"
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=place * tp, world_size=size)
    try:
        mesh = init_device_mesh("cpu", (pp, tp), mesh_dim_names=("pp", "tp"))
        yield mesh["tp"] if tp > 1 else None, ModelGroup.of(mesh["pp"]) if pp > 1 else ModelGroup()
    finally:
        _clear_sharding_prop_cache()  # it refers to the group
        dist.destroy_process_group()
