"""A connection to the store whose calls have a deadline.

torch's clients wait for the store's answer without a limit: if the process that holds it stands still, or the link to
its host is cut, a call never returns. So a thread makes the calls, and callers wait for it.

torch's store looks up the name of each peer that connects, and answers no rank meanwhile: where the name server is slow
or drops questions, that takes seconds. So a process connects once for all its engines, and calls at the start, when
ranks connect, get more time (`START_S`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d as c10d

from shardwise.machine.process import leave_behind, start_thread

T = TypeVar("T")
STORE_S = 5.0
"""How long a call to the store may take at most."""
START_S = 300.0
"""The same while engines start: as long as torch itself waits for a connection to the store."""
_SLICE_S = 0.2


class StoreSilentError(RuntimeError):
    """The store did not answer in time. It may answer later."""


_connections: weakref.WeakKeyDictionary[Any, tuple[int, Any]] = weakref.WeakKeyDictionary()


def own_connection(store: Any) -> Any:
    """This process's second connection to a store: in the first, a call of the user's may block.

    It lives as long as the store does, that is until its process group is destroyed.
    """
    process, connection = _connections.get(store, (None, None))
    if process != os.getpid():  # a forked process must not write into its parent's socket
        connection = store.clone()
        _connections[store] = (os.getpid(), connection)
    return connection


def numbered_store(name: str, rank: int) -> PrefixStore:
    """A part of the world's store for the next user of this name. Ranks number them in the same order, in that store:
    one process may have been in another world before."""
    named = PrefixStore(f"shardwise/{name}", own_connection(c10d._get_default_store()))
    return PrefixStore(str(named.add(f"of/{rank}", 1)), named)


class _Request:
    def __init__(self, work: Callable[[Any], Any]) -> None:
        self.work = work
        self.is_done = threading.Event()
        self.is_dropped = False
        self.value: Any = None
        self.error: Exception | None = None


class StoreLink:
    """Runs functions of a store, one at a time and in order, each within `limit_s`.

    While a call is overdue, others wait for a moment only: a rank that has lost the store ends soon.
    """

    def __init__(self, store: Any, limit_s: float) -> None:
        self.limit_s = limit_s
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._overdue: _Request | None = None
        self._thread = start_thread(_serve, store, self._requests, name="shardwise-store")
        # Neither the thread nor the exit keeps the link: once it is out of use, its thread ends.
        self._end = weakref.finalize(self, self._requests.put, None)

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Within it, calls may take `START_S`."""
        self.limit_s, limit_s = START_S, self.limit_s
        try:
            yield
        finally:
            self.limit_s = limit_s

    def run(self, work: Callable[[Any], T], check: Callable[[], None] | None = None) -> T:
        """What `work` returns for the store. With `check` there is no deadline: `check` is called while this waits,
        and ends the wait by raising."""
        request = _Request(work)
        self._requests.put(request)
        deadline = time.monotonic() + (0.0 if self._is_silent() else self.limit_s)
        while not request.is_done.wait(_SLICE_S):
            if check is not None:
                check()
            elif time.monotonic() > deadline:
                request.is_dropped = True
                self._overdue = request
                raise StoreSilentError(f"the store did not answer within {self.limit_s:g} s: see `StoreLink`")
        if request.error is not None:
            raise request.error
        value: T = request.value
        return value

    def _is_silent(self) -> bool:
        return self._overdue is not None and not self._overdue.is_done.is_set()

    def close(self) -> None:
        """End the thread, unless a call never returns."""
        self._end()
        if self._is_silent():
            leave_behind(self._thread)
        else:
            self._thread.join(self.limit_s)


def _serve(store: Any, requests: queue.SimpleQueue[_Request | None]) -> None:
    while (request := requests.get()) is not None:
        if not request.is_dropped:
            try:
                request.value = request.work(store)
            except Exception as error:
                request.error = error
        request.is_done.set()
        del request  # an engine must not live on for a call that is over
