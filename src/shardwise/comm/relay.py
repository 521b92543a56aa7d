"""The later hops of a gather over a backend that the host waits for: a thread issues each one when the one before it
has arrived.

The main thread cannot do it: it waits when a unit is used, and other ranks may use the unit earlier, while this one
waits for them in a collective of the user's (test_mesh.test_one_rank_alone_may_look_at_the_weights).
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from shardwise.machine.process import start_thread


class Works(NamedTuple):
    """What torch returned for one hop."""

    receives: list[Any]
    sends: list[Any]


class RelayedGather:
    """A gather whose first hop is under way. It is waited for as one work; `Sends` waits for what this rank sent."""

    def __init__(self, first: Works, later: Sequence[Callable[[], Works]]) -> None:
        self.works = [first]
        self._later = later
        self._error: BaseException | None = None
        self._is_issued = threading.Event()

    def run(self) -> None:
        """Issue each hop after the one before it."""
        try:
            for issue in self._later:
                for receive in self.works[-1].receives:
                    receive.wait()
                self.works.append(issue())
        except BaseException as error:  # raised where the gather is waited for
            self._error = error
        finally:
            self._is_issued.set()

    def wait(self) -> None:
        """Wait until everything has been received."""
        self._is_issued.wait()
        if self._error is not None:
            raise self._error
        for receive in self.works[-1].receives:
            receive.wait()


class Sends:
    """The sends of all hops of a gather that has been received."""

    def __init__(self, gather: RelayedGather) -> None:
        self._gather = gather

    def wait(self, limit: timedelta) -> None:
        for works in self._gather.works:
            for send in works.sends:
                send.wait(limit)


class Relay:
    """The thread, started with the first gather; gathers advance in the order in which they were begun."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[RelayedGather | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, gather: RelayedGather) -> None:
        if self._thread is None:
            self._thread = start_thread(_run, self._waiting, name="shardwise-relay")
            weakref.finalize(self, self._waiting.put, None)  # an engine that goes out of scope ends the thread
        self._waiting.put(gather)

    def end(self, wait_s: float) -> bool:
        """End the thread after the gathers that were begun; returns whether it ended within `wait_s` seconds."""
        if self._thread is None:
            return True
        self._waiting.put(None)
        self._thread.join(wait_s)
        return not self._thread.is_alive()


def _run(waiting: queue.SimpleQueue[RelayedGather | None]) -> None:
    while (gather := waiting.get()) is not None:
        gather.run()
