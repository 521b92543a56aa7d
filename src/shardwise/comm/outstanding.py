"""The operations that only the device waits for, oldest first.

Whether one has ended is asked by a thread of its own. Behind a kernel that never ends, a call of the main thread may
hold a lock of the CUDA driver, and then the question is not answered either: the operation counts as outstanding, and
the thread that asked is the only one that waits (found by the soak over NCCL).
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from shardwise.comm.log import Ticket
from shardwise.machine.process import start_thread


class Outstanding:
    """Tickets of operations in the order of their issue, until their works have ended."""

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
