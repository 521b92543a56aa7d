"""Operations and the log of those that this rank has issued. Pure."""

from __future__ import annotations

import zlib
from collections import deque
from typing import NamedTuple

from shardwise.comm.posts import Operations, Place, digest

_REMEMBERED = 4096
_SPREAD = 0x9E3779B1  # an odd constant, so that neighbouring numbers give tags far apart


class Ticket(NamedTuple):
    """One operation: its channel, its number there, its description, and the tag of its messages."""

    channel: str
    number: int
    text: str
    tag: int

    @property
    def place(self) -> Place:
        return self.channel, self.number


class Log:
    """What this rank has issued in each channel.

    >>> log = Log()
    >>> log.add("gather", "gather head").number, log.add("gather", "gather head").number
    (0, 1)
    """

    def __init__(self) -> None:
        self._issued: dict[str, deque[Ticket]] = {}

    def add(self, channel: str, text: str) -> Ticket:
        issued = self._issued.setdefault(channel, deque(maxlen=_REMEMBERED))
        number = issued[-1].number + 1 if issued else 0
        ticket = Ticket(channel, number, text, (zlib.crc32(text.encode()) ^ (number * _SPREAD)) & 0x7FFFFFFF)
        issued.append(ticket)
        return ticket

    def recent(self, ticket: Ticket | None, window: int) -> dict[str, Operations]:
        """The digests of the last operations of each channel: `window` of them, and in the channel of `ticket` as many
        before it and all after it."""
        recent = {}
        for channel, issued in list(self._issued.items()):  # copies: the main thread may issue an operation meanwhile
            tickets = list(issued)
            if tickets:
                beyond = tickets[-1].number + 1 - ticket.number if ticket and ticket.channel == channel else 0
                shown = tickets[-(window + beyond) :]
                recent[channel] = (shown[0].number, [digest(each.text) for each in shown])
        return recent

    def text(self, place: Place) -> str:
        """The description of an operation; empty if there is none, or it was too long ago."""
        channel, number = place
        tickets = list(self._issued.get(channel, ()))
        index = number - tickets[0].number if tickets else -1
        return tickets[index].text if 0 <= index < len(tickets) else ""
