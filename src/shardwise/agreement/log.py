"""The operations that this rank has issued, and those among them that only the device waits for."""

from __future__ import annotations

import threading
import zlib
from collections import deque
from typing import Any, NamedTuple

from shardwise.agreement.posts import Operations, Place, digest
from shardwise.machine.process import start_thread

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


class Outstanding:
    """Operations that only the device waits for, in the order of their issue, until their works have ended.

    Whether one has ended is asked by a thread of its own. Behind a kernel that never ends, a call of the main thread
    may hold a lock of the CUDA driver, and then the question is not answered either: the operation counts as
    outstanding, and the thread that asked is the only one that waits (found by the soak over NCCL).
    """

    def __init__(self, poll_s: float) -> None:
        self._poll_s = poll_s
        self._queue: deque[tuple[Ticket, Any]] = deque()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, ticket: Ticket, work: Any) -> None:
        if self._thread is None:
            self._thread = start_thread(_ask, self._queue, self._is_closed, self._poll_s, name="shardwise-device")
        self._queue.append((ticket, work))

    def oldest(self) -> Ticket | None:
        try:
            return self._queue[0][0]
        except IndexError:
            return None

    def close(self) -> None:
        self._is_closed.set()


def _ask(queue: deque[tuple[Ticket, Any]], is_closed: threading.Event, poll_s: float) -> None:
    while not is_closed.wait(poll_s):
        while queue and queue[0][1].is_completed():
            queue.popleft()
