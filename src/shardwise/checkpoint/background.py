"""A save that goes on while training does: a thread writes what was copied to host memory.

The thread calls no collective, which would meet those of training: ranks meet in the folder, where rank 0 waits for
every rank's table and commits. What went wrong is told when all ranks come together again, in `finish`.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any

from shardwise.checkpoint.saving import Job
from shardwise.checkpoint.together import first, together
from shardwise.comm import Comm
from shardwise.errors import CheckpointError

_LOG = logging.getLogger("shardwise")
_POLL_S = 0.02
_LAST_WAIT_S = 60.0
"""How long rank 0 waits for the others' files once its own program has ended; they may have been killed."""


class Background:
    """One asynchronous save."""

    def __init__(self, job: Job, comm: Comm) -> None:
        self._job = job
        self._comm = comm
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shardwise-save")
        self._writing = self._submit(job.write)
        self._committing = self._submit(self._commit) if comm.rank == 0 else None

    def finish(self) -> None:
        """Wait until the checkpoint is there; a CheckpointError on all ranks if it is not to be. A collective."""
        try:
            together(self._comm, self._writing.result)
            first(self._comm, lambda: self._committing.result() if self._committing else None)
        except BaseException:
            self._job.draft.discard()
            raise
        finally:
            self._stop.set()
            self._pool.shutdown()

    def leave(self) -> None:
        """Wait for this rank's part alone: for an engine that goes away, perhaps after an error."""
        wait_for([future for future in (self._writing, self._committing) if future is not None], _LAST_WAIT_S)
        self._stop.set()
        self._pool.shutdown()

    def _submit(self, work: Any) -> Future[None]:
        future: Future[None] = self._pool.submit(work)
        future.add_done_callback(_tell)
        return future

    def _commit(self) -> None:
        self._writing.result()
        deadline: float | None = None
        while not self._job.is_written():
            if deadline is None and not threading.main_thread().is_alive():
                deadline = time.monotonic() + _LAST_WAIT_S
            if self._stop.is_set() or (deadline is not None and time.monotonic() > deadline):
                self._job.draft.discard()
                raise CheckpointError(f"not all ranks wrote their part of {self._job.draft.target}")
            time.sleep(_POLL_S)
        self._job.commit()


def _tell(future: Future[None]) -> None:
    """At once in the log: the call that raises it may be hours away."""
    error = future.exception()
    if error is not None:
        _LOG.error("an asynchronous save failed: %s", error)
