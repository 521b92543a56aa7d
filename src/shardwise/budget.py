"""How much may be in flight, decided before the first step from sizes alone.

Gradients travel in one of two ways:

- *whole*: autograd adds into the unit's flat buffer, which is sent as it is, while the next unit's gradients arrive.
- *piecewise*: autograd's own gradients are packed into small pieces, sent one after the other; nothing else is open.

Whole is quicker. Piecewise is for models that are one unit, or mostly one: there the flat buffer, the receive buffer
and the held shards would together take more than replicated gradients do, and the stages would be upside down.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Flight:
    """How gradients travel: in how many `pieces` a unit is exchanged, and whether the next unit may `overlap` it."""

    pieces: int = 1
    overlap: bool = True

    @property
    def is_whole(self) -> bool:
        return self.pieces == 1


@dataclass(frozen=True)
class GradSizes:
    """Bytes of one unit: its full gradients, its largest parameter's, and the shard held after the reduction."""

    full: int
    largest: int
    held: int


_WHOLE = (Flight(1, overlap=True), Flight(1, overlap=False))
_PIECEWISE = tuple(Flight(2**power, overlap=False) for power in range(2, 11))


def choose_flight(
    units: Sequence[GradSizes], is_sharded: bool, accumulates: bool, bound_bytes: int | None = None
) -> Flight:
    """The quickest flight with which sharded gradients take no more memory than replicated ones would.

    `units` are in forward order; `accumulates` says that shards are held from one micro-batch to the next.
    `bound_bytes` is the user's upper bound on the buffers of one exchange.
    """
    largest = max((unit.full for unit in units), default=0)
    limit = replicated_peak(units)
    for flight in (*_WHOLE, *_PIECEWISE):
        if bound_bytes is not None and exchange_bytes(largest, flight) > bound_bytes:
            continue
        if not is_sharded or sharded_peak(units, accumulates, flight) <= limit:
            return flight
    return _PIECEWISE[-1]


def exchange_bytes(full: int, flight: Flight) -> int:
    """The buffers of one exchange: a receive buffer, and in pieces a send buffer too."""
    return full if flight.is_whole else 2 * -(-full // flight.pieces)


def replicated_peak(units: Sequence[GradSizes]) -> int:
    """The most that gradients take in a backward where they are replicated."""
    resting = sum(unit.full for unit in units)
    arriving = (unit.largest + (later.full if later else 0) for unit, later in _backward(units))
    return resting + max((*arriving, *(unit.full for unit in units)), default=0)


def sharded_peak(units: Sequence[GradSizes], accumulates: bool, flight: Flight) -> int:
    """The same where they are sharded. `_backward` pairs each unit with the one reduced before it."""
    held = sum(unit.held for unit in units) if accumulates else 0
    peak = 0
    for unit, later in _backward(units):
        if later and not accumulates:
            held += later.held
        in_flight = 2 * later.full if later and flight.overlap else 0
        arriving = unit.full + (unit.largest if flight.is_whole else 0) + in_flight
        # In pieces, the shard is held before the pieces are added up; whole, it takes the receive buffer's place.
        ahead = unit.held if not accumulates and not flight.is_whole else 0
        reducing = unit.full + exchange_bytes(unit.full, flight) + ahead
        peak = max(peak, held + arriving, held + reducing)
    return peak


def _backward(units: Sequence[GradSizes]) -> Iterator[tuple[GradSizes, GradSizes | None]]:
    later: GradSizes | None = None
    for unit in reversed(units):
        yield unit, later
        later = unit
