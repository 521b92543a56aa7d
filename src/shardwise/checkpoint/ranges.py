"""Which stored ranges make up the elements that a rank wants. Integers only.

A tensor is stored as pieces, each a run of its flat elements in some file. World size, units and stages are not in
the format: a piece says what it covers, and whoever loads intersects that with what it owns.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardwise.partition.layout import Span


class Piece(NamedTuple):
    """The flat elements [start, stop) of a tensor, `offset` bytes into the file with number `file`."""

    file: int
    start: int
    stop: int
    offset: int


class Fetch(NamedTuple):
    """Bytes to read: those of `elements` of a tensor, `offset` bytes into a file."""

    file: int
    offset: int
    elements: Span


def fetches(pieces: Sequence[Piece], itemsize: int, wanted: Span) -> Iterator[Fetch]:
    """What to read for the elements `wanted`, in their order. `pieces` are sorted and cover them.

    >>> [fetch.elements for fetch in fetches([Piece(0, 0, 10, 8), Piece(1, 10, 16, 8)], 4, Span(8, 12))]
    [Span(start=8, stop=10), Span(start=10, stop=12)]
    """
    index = bisect_right(pieces, wanted.start, key=lambda piece: piece.stop)
    position = wanted.start
    while position < wanted.stop:
        piece = pieces[index]
        part = Span(position, min(piece.stop, wanted.stop))
        yield Fetch(piece.file, piece.offset + (position - piece.start) * itemsize, part)
        position, index = part.stop, index + 1


def gap(pieces: Sequence[Piece], numel: int) -> Span | None:
    """The first elements of a tensor of `numel` that sorted `pieces` leave out or have twice; None if all is well."""
    position = 0
    for piece in pieces:
        if piece.start != position or piece.stop <= piece.start:
            return Span(min(position, piece.start), max(position, piece.start))
        position = piece.stop
    return None if position == numel else Span(min(position, numel), max(position, numel))
