"""Operations and the log of those that this rank has issued. Pure."""

from __future__ import annotations

import zlib
from collections import deque
from typing import NamedTuple

from shardwise.comm.posts import Operations

_REMEMBERED, _POSTED = 4096, 256
_SPREAD = 0x9E3779B1  # an odd constant, so that neighbouring numbers give tags far apart


class Ticket(NamedTuple):
    """One operation: its channel, its number there, its description, and the tag of its messages."""

    channel: str
    number: int
    text: str
    tag: int


class Log:
    """What this rank has issued in each channel.

    >>> log = Log()
    >>> log.add("gather", "gather head").number, log.add("gather", "gather head").number
    (0, 1)
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._texts: dict[str, deque[str]] = {}

    def add(self, channel: str, text: str) -> Ticket:
        number = self._counts.get(channel, 0)
        self._counts[channel] = number + 1
        self._texts.setdefault(channel, deque(maxlen=_REMEMBERED)).append(text)
        return Ticket(channel, number, text, (zlib.crc32(text.encode()) ^ (number * _SPREAD)) & 0x7FFFFFFF)

    def recent(self, ticket: Ticket | None) -> dict[str, Operations]:
        """The last operations of each channel; in the channel of `ticket`, from some time before it to the last."""
        recent = {}
        for channel, texts in list(self._texts.items()):  # a copy: the main thread may add a channel meanwhile
            wanted = _POSTED + (self._counts[channel] - ticket.number if ticket and ticket.channel == channel else 0)
            shown = list(texts)[-wanted:]
            recent[channel] = (self._counts[channel] - len(shown), shown)
        return recent
