"""A save that goes on while training does: a thread writes what was copied to host memory.

The thread calls no collective, which would meet those of training: ranks meet in the folder, where rank 0 waits for
every rank's table and commits. What went wrong is told when all ranks come together again, in `finish`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from shardwise.checkpoint.saving import Job
from shardwise.checkpoint.together import first, together
from shardwise.comm.comm import Comm
from shardwise.errors import CheckpointError

_LOG = logging.getLogger("shardwise")
_POLL_S = 0.02
_LAST_WAIT_S = 60.0
"""How long rank 0 waits, once its program goes away, for others' files that do not grow: they may have been killed."""


class Background:
    """One asynchronous save."""

    def __init__(self, job: Job, comm: Comm) -> None:
        self._job = job
        self._comm = comm
        self._stop = threading.Event()
        self._leaving = threading.Event()
        self._written: Future[None] = Future()
        self._committed: Future[None] = Future()
        # No daemon, and no executor: Python waits for it at its end, when the main thread is no longer alive.
        self._thread = threading.Thread(target=self._run, name="shardwise-save")
        self._thread.start()

    def finish(self) -> None:
        """Wait until the checkpoint is there; a CheckpointError on all ranks if it is not to be. A collective."""
        try:
            together(self._comm, self._written.result)
            first(self._comm, self._committed.result)
        finally:
            self._stop.set()
            self._end()

    def leave(self) -> None:
        """Wait for this rank's part alone: for an engine that goes away, perhaps after an error."""
        self._leaving.set()
        self._end()

    def _end(self) -> None:
        self._thread.join()
        self._job.discard()

    def _run(self) -> None:
        _settle(self._written, self._job.write)
        if self._comm.rank == 0 and not self._written.exception():
            _settle(self._committed, self._commit)

    def _commit(self) -> None:
        size, deadline = -1, math.inf
        while not self._job.is_written():
            if self._is_leaving():
                before, size = size, self._job.draft.size_bytes()
                deadline = deadline if size == before else time.monotonic() + _LAST_WAIT_S
            if self._stop.is_set() or time.monotonic() > deadline:
                self._job.discard()
                raise CheckpointError(f"not all ranks wrote their part of {self._job.draft.target}")
            time.sleep(_POLL_S)
        self._job.commit()

    def _is_leaving(self) -> bool:
        return self._leaving.is_set() or not threading.main_thread().is_alive()


def _settle(future: Future[None], work: Callable[[], None]) -> None:
    try:
        work()
    except BaseException as error:
        # At once in the log: the call that raises it may be hours away.
        _LOG.error("an asynchronous save failed: %s", error)
        future.set_exception(error)
    else:
        future.set_result(None)
