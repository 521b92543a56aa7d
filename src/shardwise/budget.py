"""How much may be in flight, decided before the first step from sizes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Flight:
    """How gradients travel: full gradients of how many units exist at once, and in how many pieces one is exchanged."""

    units: int
    pieces: int


_CHOICES = (Flight(2, 1), Flight(1, 1), Flight(1, 4), Flight(1, 8), Flight(1, 16))


def choose_flight(unit_bytes: Sequence[int], held_bytes: int, bound_bytes: int | None = None) -> Flight:
    """The roomiest flight with which sharded gradients take no more memory than replicated ones would.

    `unit_bytes` are the full gradients of each unit in forward order, `held_bytes` the shards held between
    micro-batches. Replicated gradients take all units and one receive buffer. In a model of many units the first
    choice is far below that; a model that is one unit, or mostly one, must be content with less in flight.
    `bound_bytes` is the user's upper bound on the buffers of one exchange.
    """
    if not unit_bytes:
        return _CHOICES[0]
    limit = sum(unit_bytes) + max(unit_bytes)
    for flight in _CHOICES:
        buffers = _exchange_bytes(max(unit_bytes), flight)
        within_bound = bound_bytes is None or buffers <= bound_bytes
        if within_bound and _open_bytes(unit_bytes, flight) + held_bytes + buffers <= limit:
            return flight
    return _bounded(max(unit_bytes), bound_bytes)


def _exchange_bytes(unit_bytes: int, flight: Flight) -> int:
    return unit_bytes if flight.pieces == 1 else 2 * -(-unit_bytes // flight.pieces)


def _open_bytes(unit_bytes: Sequence[int], flight: Flight) -> int:
    if flight.units == 1 or len(unit_bytes) == 1:
        return max(unit_bytes)
    return max(a + b for a, b in zip(unit_bytes, unit_bytes[1:], strict=False))


def _bounded(unit_bytes: int, bound_bytes: int | None) -> Flight:
    pieces = _CHOICES[-1].pieces
    while bound_bytes and pieces < 1024 and _exchange_bytes(unit_bytes, Flight(1, pieces)) > bound_bytes:
        pieces *= 2
    return Flight(1, pieces)
