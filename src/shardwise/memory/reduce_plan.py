"""How much may be in flight, decided before the first step from sizes alone.

Sharded gradients travel in one of two ways:

- *whole*: a unit's gradients are packed into one buffer and sent, while the next unit's gradients arrive.
- *in parts*: they are packed and sent in small parts, one after the other, before the next unit's arrive.

Whole is faster. Parts are for models that are one unit, or mostly one: there the buffers and the shards would together
take more memory than replicated gradients do, and a higher stage would need more than a lower one.

Small units are updated several at a time: a call of an optimizer costs the host the same for one as for many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class ReducePlan:
    """How gradients are reduced: in how many `parts` a unit is sent, and whether the next backward overlaps it."""

    parts: int = 1
    overlap: bool = True

    @property
    def is_whole(self) -> bool:
        return self.parts == 1


_SUM_BLOCK_NUMEL = 1 << 16
"""Elements summed at a time on the CPU: 256 KiB of fp32, so that a block stays in the cache."""


def sum_block_numel(numel: int, kernels: str) -> int:
    """How many elements of a shard are added up at a time by the kernels of a device type."""
    return _SUM_BLOCK_NUMEL if kernels == "cpu" else max(1 << 18, -(-numel // 16))


@dataclass(frozen=True)
class GradSizes:
    """What the gradients of one unit take, in bytes unless it says otherwise.

    full         the unit's full gradients
    rested       the same where they would rest if replicated (fp32 where several micro-batches are added up)
    largest      those of its largest parameter
    held         the shard after the reduction
    sent         what is sent, in the dtype of the wire
    received     what is received: the rows of all ranks, or of all others where a rank's own is taken from `sent`
    shard_numel  elements of a shard
    block_numel  elements of the fp32 block in which 16-bit rows are added up
    """

    full: int
    rested: int
    largest: int
    held: int
    sent: int
    received: int
    shard_numel: int
    block_numel: int

    def summing(self, parts: int) -> int:
        return 4 * min(self.block_numel, -(-self.shard_numel // parts))


@dataclass(frozen=True)
class UpdateSizes:
    """Elements of one unit, and what its gradients take more than at rest, in bytes: while they are made ready for its
    update, and from then until it is issued."""

    numel: int
    preparing: int
    ready: int


_WHOLE = (ReducePlan(1, overlap=True), ReducePlan(1, overlap=False))
_IN_PARTS = tuple(ReducePlan(2**power, overlap=False) for power in range(2, 11))
_SMALL_BYTES = 8 << 10
"""Parts are not made smaller than this to save memory: activations take more, and each message costs time."""


def choose_reduce_plan(
    units: Sequence[GradSizes], is_sharded: bool, accumulates: bool, bound_bytes: int | None = None
) -> ReducePlan:
    """The fastest plan with which sharded gradients take no more memory than replicated ones would.

    `units` are in forward order; `accumulates` says that shards are held from one micro-batch to the next.
    `bound_bytes` is the user's upper bound on the buffers of one exchange.
    """
    limit = replicated_peak(units, accumulates)
    for reduce_plan in (*_WHOLE, *_IN_PARTS):
        size_bytes = max((exchange_bytes(unit, reduce_plan) for unit in units), default=0)
        if bound_bytes is not None and size_bytes > bound_bytes:
            continue
        is_small = not reduce_plan.is_whole and size_bytes <= _SMALL_BYTES
        if not is_sharded or is_small or sharded_peak(units, accumulates, reduce_plan) <= limit:
            return reduce_plan
    return _IN_PARTS[-1]


def update_batches(units: Sequence[UpdateSizes]) -> list[range]:
    """Which of the `units`, in this order, are updated together.

    A batch takes no more memory than the largest unit alone, and at most twice as long: the next forward waits for the
    first of its new weights.
    """
    longest = 2 * max([unit.numel for unit in units], default=0)
    widest = max([unit.preparing for unit in units], default=0)
    found: list[range] = []
    numel = ready = start = 0
    for index, unit in enumerate(units):
        if index > start and (numel + unit.numel > longest or ready + unit.preparing > widest):
            found.append(range(start, index))
            numel, ready, start = 0, 0, index
        numel += unit.numel
        ready += unit.ready
    return [*found, range(start, len(units))] if units else found


def exchange_bytes(unit: GradSizes, reduce_plan: ReducePlan) -> int:
    """The buffers of one exchange of gradients: one to send from, one to receive into."""
    return -(-(unit.sent + unit.received) // reduce_plan.parts)


class GradUse(NamedTuple):
    """What gradients take around one unit of a backward: those that rest, and those in flight, while its own arrive;
    what its own add to that; and all together when the backward leaves it."""

    resting: int
    in_flight: int
    own: int
    leaving: int

    @property
    def peak(self) -> int:
        return max(self.resting + self.in_flight + self.own, self.leaving)


def replicated_peak(units: Sequence[GradSizes], accumulates: bool) -> int:
    """The peak of the gradients in a backward where they are replicated and sent from their own buffer."""
    return max((use.peak for use in replicated_uses(units, accumulates)), default=0)


def sharded_peak(units: Sequence[GradSizes], accumulates: bool, reduce_plan: ReducePlan) -> int:
    """The same where they are sharded."""
    return max((use.peak for use in sharded_uses(units, accumulates, reduce_plan)), default=0)


def replicated_uses(units: Sequence[GradSizes], accumulates: bool) -> Iterator[GradUse]:
    """Unit by unit in backward order, where gradients are replicated."""
    resting = sum(unit.rested for unit in units) if accumulates else 0
    for unit, later in _backward(units):
        receiving = later.received if later else 0
        if accumulates:
            yield GradUse(resting, receiving, unit.largest, resting + unit.received)
        else:
            yield GradUse(resting, receiving, unit.full, resting + unit.full + max(unit.full, unit.received))
            resting += unit.full


def sharded_uses(units: Sequence[GradSizes], accumulates: bool, reduce_plan: ReducePlan) -> Iterator[GradUse]:
    """The same where they are sharded. `_backward` pairs each unit with the one reduced before it."""
    held = sum(unit.held for unit in units) if accumulates else 0
    for unit, later in _backward(units):
        made = later.held if later and not accumulates else 0
        in_flight = _exchange_peak(later, accumulates, reduce_plan) if later and reduce_plan.overlap else made
        reducing = _reducing_peak(unit, accumulates, reduce_plan)
        yield GradUse(held, in_flight, unit.full, held + made + reducing)
        held += made


def _reducing_peak(unit: GradSizes, accumulates: bool, reduce_plan: ReducePlan) -> int:
    """An exchange, and the gradients from which it is made."""
    exchange = _exchange_peak(unit, accumulates, reduce_plan)
    # Gradients that are packed as a whole are dropped then, before the receive buffer is allocated.
    return max(exchange, unit.full + unit.sent) if reduce_plan.is_whole else exchange + unit.full


def _exchange_peak(unit: GradSizes, accumulates: bool, reduce_plan: ReducePlan) -> int:
    """The buffers of an exchange, and what it makes."""
    made = (0 if accumulates else unit.held) + unit.summing(reduce_plan.parts)
    if reduce_plan.is_whole and unit.received >= unit.sent:
        # The send buffer is freed before the shard is allocated.
        return max(exchange_bytes(unit, reduce_plan), unit.received + made)
    return exchange_bytes(unit, reduce_plan) + made


def _backward(units: Sequence[GradSizes]) -> Iterator[tuple[GradSizes, GradSizes | None]]:
    later: GradSizes | None = None
    for unit in reversed(units):
        yield unit, later
        later = unit
