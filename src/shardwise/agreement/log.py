"""The operations that this rank has issued, those that only the device waits for, and which one follows the last two.

Where nothing on the wire tells operations apart, a rank issues an operation at once only if it is the one that followed
the last two before (`Turns`); any other is met over (see `agreement`). All ranks have met over the same operations, so
each has the same knowledge, and after the same history only one operation is known on all of them. A rank that does
anything else meets, and issues nothing.

A pass goes from unit to unit. So what followed two operations of some units is expected to follow the same two of the
next units. Where nothing is known, it is the same operation of the next unit, or of the one before the last; after
operations that an exchange announced, it is that exchange again. A first pass costs a few meetings, whatever the number
of units. An expectation that fails costs one more.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from shardwise.agreement.posts import Operations, Place, digest
from shardwise.machine.process import start_thread

_REMEMBERED = 4096
_SPREAD = 0x9E3779B1  # an odd constant, so that neighbouring numbers give tags far apart
_Step = tuple[str, int | None]
"""An operation without the name of its unit, and the number of that unit, or None."""
_Turn = tuple[str, tuple[_Step, ...]]


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


class Turns:
    """The operations that followed one another, by channel.

    >>> turns = Turns()
    >>> turns.name_units(["embed", "blocks.0", "blocks.1", "blocks.2", "head"])
    >>> [turns.take("gather", f"gather {unit}, 8 elements", unit) for unit in ("embed", "blocks.0", "blocks.1")]
    [False, True, True]
    >>> [turns.take("gather", f"gather {unit}, 8 elements", unit) for unit in ("blocks.2", "embed")]
    [True, False]
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._last: dict[str, list[_Step]] = {}
        self._places: dict[str, int] = {}
        self._next: dict[_Turn, _Step] = {}
        self._announcer: dict[str, _Step | None] = {}  # what announced the last operation of the channel
        self._next_alike: dict[_Turn, _Step] = {}  # relative to the last unit

    def name_units(self, names: Sequence[str]) -> None:
        """Number the units, in an order that is the same on all ranks. Their sizes are too."""
        self._numbers = {name: number for number, name in enumerate(names)}

    def take(self, channel: str, text: str, unit: str, is_announced: bool = False) -> bool:
        """Record the next operation; returns whether all ranks expect it: it followed the same operations before, or
        the last one announced it to all ranks."""
        place, last, step = self._places.get(channel, 0), self._last.get(channel, []), self._step(text, unit)
        turn, alike = (channel, tuple(last)), (channel, tuple(_moved(each, -place) for each in last))
        is_expected = is_announced or self._expect(turn, alike, place) == step
        self._next[turn] = step
        self._next_alike[alike] = _moved(step, -place)
        self._last[channel] = [*last[-1:], step]
        if step[1] is not None:
            self._places[channel] = step[1]
        if not is_announced:
            self._announcer[channel] = None
        elif self._announcer.get(channel) is None and last:
            self._announcer[channel] = last[-1]
        return is_expected

    def _expect(self, turn: _Turn, alike: _Turn, place: int) -> _Step | None:
        if turn in self._next:
            return self._next[turn]
        if alike in self._next_alike:
            return _moved(self._next_alike[alike], place)
        if (announcer := self._announcer.get(turn[0])) is not None:
            return announcer
        text, number = turn[1][-1] if turn[1] else ("", None)
        return None if number is None else (text, number + (1 if number < len(self._numbers) - 1 else -1))

    def restart(self, channel: str, text: str) -> None:
        """An event that sends nothing, such as a broken pass, interrupts the sequence."""
        self._last[channel], self._announcer[channel] = [(text, None)], None

    def _step(self, text: str, unit: str) -> _Step:
        name = unit.partition(" ")[0]
        number = self._numbers.get(name)
        return (text, None) if number is None else (text.partition(", ")[0].replace(name, "*", 1), number)


def _moved(step: _Step, by: int) -> _Step:
    text, number = step
    return text, None if number is None else number + by
