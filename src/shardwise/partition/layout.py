"""The position of every element of a unit: flat offsets, shards, padding. Integers only.

A unit's tensors are packed into one flat buffer, which is cut into W shards of equal size:

    |         rank 0        |         rank 1        |         rank 2        |
    | a a a a a . | b b b b : b b b b b b . | c c c : c c c c c c . | d . . |
    |               group 0                 |            group 1            |

    .  padding      every | and : (a shard cut inside a tensor) lies on a 128-byte boundary

- Tensors keep their given order inside an optimizer group, and groups follow one another by number. So a group is one
  contiguous run in the buffer and at most one run in any shard: the update needs one kernel per group and unit.
- The boundary is 128 bytes in the dtype of the weights; fp32 copies in the same layout are aligned more strictly.
  Kernels round the elements of their vector tails differently, so with unaligned cuts the bits would depend on W
  (tests/test_layout.py::test_tensors_groups_and_shards_start_on_the_boundary).
- `Cut.ELEMENT` cuts the buffer wherever a shard ends; padding is below 128 bytes x (W + number of tensors).
- `Cut.TENSOR` assigns whole tensors to ranks of balanced load, for optimizers that need matrices. Each shard is as
  large as the heaviest load, so its padding depends on the shapes.
"""

from __future__ import annotations

import enum
import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.partition.part import TensorPart

ALIGN_BYTES = 128


class Cut(enum.Enum):
    """Where the flat buffer may be cut into shards."""

    ELEMENT = "element"
    TENSOR = "tensor"


@dataclass(frozen=True, slots=True)
class Span:
    """The half-open range [start, stop) of elements; false when empty.

    >>> Span(0, 6).intersect(Span(4, 9))
    Span(start=4, stop=6)
    """

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)

    def intersect(self, other: Span) -> Span:
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def shift(self, by: int) -> Span:
        return Span(self.start + by, self.stop + by)

    def split(self, most: int) -> Iterator[Span]:
        """The range in parts of at most `most` elements.

        >>> [part.numel for part in Span(0, 100).split(64)]
        [64, 36]
        """
        for start in range(self.start, self.stop, most):
            yield Span(start, min(start + most, self.stop))

    def __bool__(self) -> bool:
        return self.stop > self.start


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to pack; `group` is the number of its optimizer parameter group.

    `whole`: its optimizer needs it undivided and in its shape, which requires `Cut.TENSOR`. `part`: which part of a
    larger tensor it is, where tensor parallelism has cut it.
    """

    name: str
    shape: tuple[int, ...]
    group: int = 0
    whole: bool = False
    part: TensorPart | None = None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the tensor of which it is a part."""
        return self.shape if self.part is None else self.part.shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Slot:
    """The position of a tensor in the flat buffer."""

    spec: TensorSpec
    span: Span


@dataclass(frozen=True, slots=True)
class GroupRun:
    """The part of a shard that belongs to one optimizer group, including the padding after its tensors.

    A run with a `shape` is one whole tensor; see `Layout.updates`.
    """

    group: int
    shard: Span
    shape: tuple[int, ...] | None = None

    def split(self, most: int) -> tuple[GroupRun, ...]:
        """The run in parts of at most `most` elements; a whole tensor is not split."""
        if self.shape is not None:
            return (self,)
        return tuple(GroupRun(self.group, part) for part in self.shard.split(most))


@dataclass(frozen=True)
class Layout:
    """The packing of one unit over `world_size` ranks. `slots` are in the order of the flat buffer.

    >>> layout = Layout.build([TensorSpec("w", (10, 10)), TensorSpec("b", (10,))], world_size=2, itemsize=4)
    >>> layout.shard_numel, layout.padding_numel
    (96, 82)
    >>> layout.shard(1), layout.slot("b").span
    (Span(start=96, stop=192), Span(start=128, stop=138))
    """

    world_size: int
    itemsize: int
    slots: tuple[Slot, ...]
    shard_numel: int

    @classmethod
    def build(cls, specs: Sequence[TensorSpec], world_size: int, itemsize: int, cut: Cut = Cut.ELEMENT) -> Layout:
        """Pack `specs` for `world_size` ranks; `itemsize` is the bytes of one weight."""
        _check(specs, world_size, itemsize, cut)
        align = ALIGN_BYTES // itemsize
        ordered = sorted(specs, key=lambda spec: spec.group)
        if cut is Cut.ELEMENT:
            slots, used = _pack(ordered, 0, align)
            return cls(world_size, itemsize, tuple(slots), _round_up(-(-used // world_size), align))
        loads = _balance(ordered, world_size, align)
        shard_numel = max(_pack(load, 0, align)[1] for load in loads)
        packed = (_pack(load, rank * shard_numel, align)[0] for rank, load in enumerate(loads))
        return cls(world_size, itemsize, tuple(slot for slots in packed for slot in slots), shard_numel)

    @property
    def numel(self) -> int:
        """Elements of the flat buffer, including padding."""
        return self.world_size * self.shard_numel

    @cached_property
    def used_numel(self) -> int:
        return sum(slot.span.numel for slot in self.slots)

    @property
    def padding_numel(self) -> int:
        return self.numel - self.used_numel

    @cached_property
    def gaps(self) -> tuple[Span, ...]:
        """The padding: the spans between the slots and after the last."""
        stops = [0, *(slot.span.stop for slot in self.slots)]
        starts = [*(slot.span.start for slot in self.slots), self.numel]
        return tuple(Span(stop, start) for stop, start in zip(stops, starts, strict=True) if start > stop)

    def slot(self, name: str) -> Slot:
        return self._by_name[name]

    def shard(self, rank: int) -> Span:
        """The flat elements that `rank` owns."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size} ranks")
        return Span(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def counted(self, index: int) -> tuple[Span, ...]:
        """What a sum over all ranks has of a shard: all of it but the tensors that other ranks of the tensor-
        parallel axis count."""
        shard, spans = self.shard(index), [Span(0, self.numel)]
        # From a tensor that counts to the next that does not: spans start on the boundary.
        for slot in self.slots:
            is_counted = slot.spec.part is None or slot.spec.part.is_counted
            if is_counted and not spans[-1]:
                spans.append(Span(slot.span.start, self.numel))
            elif not is_counted and spans[-1]:
                spans[-1:] = [Span(spans[-1].start, slot.span.start), Span(0, 0)]
        return tuple(part.shift(-shard.start) for span in spans if (part := span.intersect(shard)))

    def groups(self, part: int | Span) -> tuple[GroupRun, ...]:
        """The optimizer groups of a shard, or of any other part, sorted; they cover it without gaps."""
        shard = part if isinstance(part, Span) else self.shard(part)
        # Runs neither overlap nor change order, so their starts and their stops are both sorted.
        first = bisect_right(self.runs, shard.start, key=lambda run: run.shard.stop)
        end = bisect_left(self.runs, shard.stop, key=lambda run: run.shard.start)
        owned = ((run.group, run.shard.intersect(shard)) for run in self.runs[first:end])
        return tuple(GroupRun(group, part.shift(-shard.start)) for group, part in owned if part)

    def updates(self, part: int | Span | None) -> tuple[GroupRun, ...]:
        """What the optimizer updates: each `whole` tensor in its shape, and one flat run per other group. Of a shard or
        another part of the buffer, or of all of it for None."""
        span = Span(0, self.numel) if part is None else part if isinstance(part, Span) else self.shard(part)
        start, runs = span.start, self.runs if span.numel == self.numel else self.groups(span)
        whole = {slot.spec.group for slot in self.slots if slot.spec.whole}
        return tuple(part for run in runs for part in (self._tensors(run, start) if run.group in whole else (run,)))

    def samples(self, span: Span, count: int) -> list[int]:
        """Elements of each tensor in `span` of the buffer, relative to it: all of a small tensor, of a larger one from
        `count` to twice as many, evenly spaced.

        >>> Layout.build([TensorSpec("a", (2,)), TensorSpec("b", (40,))], 1, itemsize=4).samples(Span(0, 72), 4)
        [0, 1, 32, 42, 52, 62]
        """
        parts = [slot.span.intersect(span).shift(-span.start) for slot in self.slots]
        return [at for part in parts for at in range(part.start, part.stop, max(1, part.numel // count))]

    def _tensors(self, run: GroupRun, start: int) -> list[GroupRun]:
        """The tensors of a run; none where a rank has only padding of it."""
        first = bisect_left(self.slots, run.shard.start + start, key=lambda slot: slot.span.start)
        end = bisect_left(self.slots, run.shard.stop + start, key=lambda slot: slot.span.start)
        slots = (slot for slot in self.slots[first:end] if slot.span)
        return [GroupRun(run.group, slot.span.shift(-start), slot.spec.shape) for slot in slots]

    @cached_property
    def _by_name(self) -> dict[str, Slot]:
        return {slot.spec.name: slot for slot in self.slots}

    @cached_property
    def runs(self) -> tuple[GroupRun, ...]:
        """The runs of equal group in the whole flat buffer; each extends to the start of the next."""
        starts: list[tuple[int, int]] = []
        for slot in self.slots:
            if slot.span and (not starts or starts[-1][0] != slot.spec.group):
                starts.append((slot.spec.group, slot.span.start))
        stops = [start for _, start in starts[1:]] + [self.numel]
        return tuple(GroupRun(group, Span(start, stop)) for (group, start), stop in zip(starts, stops, strict=False))


def _pack(specs: Sequence[TensorSpec], start: int, align: int) -> tuple[list[Slot], int]:
    """Consecutive slots for `specs` from `start`, and the aligned number of elements they take."""
    position, slots = start, []
    for spec in specs:
        stop = position + spec.numel
        slots.append(Slot(spec, Span(position, stop)))
        position = _round_up(stop, align)
    return slots, position - start


def _balance(specs: Sequence[TensorSpec], world_size: int, align: int) -> list[list[TensorSpec]]:
    """The tensors of each rank: the largest first, each to the least loaded rank (the lowest of equals)."""
    loads = [(0, rank) for rank in range(world_size)]
    owner = [0] * len(specs)
    for index in sorted(range(len(specs)), key=lambda index: -specs[index].numel):
        load, rank = loads[0]
        owner[index] = rank
        heapq.heapreplace(loads, (load + _round_up(specs[index].numel, align), rank))
    owned: list[list[TensorSpec]] = [[] for _ in range(world_size)]
    for spec, rank in zip(specs, owner, strict=True):
        owned[rank].append(spec)
    return owned


def _round_up(numel: int, align: int) -> int:
    return -(-numel // align) * align


def _check(specs: Sequence[TensorSpec], world_size: int, itemsize: int, cut: Cut) -> None:
    if world_size < 1:
        raise ValueError(f"a layout needs at least one rank, not {world_size}")
    if itemsize < 1 or ALIGN_BYTES % itemsize:
        raise ValueError(f"an item of {itemsize} bytes does not divide the boundary of {ALIGN_BYTES} bytes")
    seen: set[str] = set()
    kinds = {(spec.group, spec.whole) for spec in specs}
    for spec in specs:
        if spec.whole and (cut is not Cut.TENSOR or (spec.group, False) in kinds):
            raise ValueError(f"tensor {spec.name!r} must stay whole: cut its unit by tensor, its group whole")
        if spec.name in seen:
            raise ValueError(f"tensor {spec.name!r} is listed twice; list a tied parameter once")
        if any(size < 0 for size in spec.shape):
            raise ValueError(f"tensor {spec.name!r} has a negative size in its shape {spec.shape}")
        seen.add(spec.name)
