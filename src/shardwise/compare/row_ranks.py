"""The ranks of one row: fresh processes that answer requests through pipes, see `worker`."""

from __future__ import annotations

import contextlib
import os
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, cast

from shardwise.compare.job import CompareJob, CompareRow, Settings, interpreter
from shardwise.machine import launch
from shardwise.machine.local_ranks import LocalRanks
from shardwise.models import loading

TIMEOUT_S = 600.0
GRACE_S = 2.0
"""How long after a rank's failure the others may still report theirs, and how long a rank may take to exit."""


class RowFailed(Exception):
    """A row cannot continue. The message is what its line of the table shows."""


class RowRanks:
    """The ranks of one row in fresh processes, which run until `close`."""

    def __init__(self, settings: Settings, row: CompareRow) -> None:
        self._ranks = LocalRanks("compare", GRACE_S)
        self._connections: list[Connection] = []
        threads = launch.threads_per_rank(settings.world_size)
        try:
            for rank in range(settings.world_size):
                self._start(CompareJob(settings, row, rank, str(self._ranks.folder / "store"), threads))
        except BaseException:
            self.close()
            raise

    def ask(self, verb: str, *arguments: Any, timeout_s: float = TIMEOUT_S) -> list[dict[str, Any]]:
        """Every rank's answer, in rank order. The first failure ends all ranks and raises `RowFailed`."""
        answers: dict[int, dict[str, Any]] = {}
        waiting: dict[Any, int] = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(OSError):  # a rank that has exited is noticed when its answer is read
            for connection in self._connections:
                connection.send((verb, arguments))
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), left_s):
                rank = waiting.pop(ready)
                answers[rank] = self._answer(rank)
            if any("error" in answer for answer in answers.values()):
                deadline = min(deadline, time.monotonic() + GRACE_S)
        errors = [answers[rank] for rank in sorted(answers) if "error" in answers[rank]]
        if errors or waiting:
            self.close()
        if errors:
            # An exception says more than the death of a rank that lost its connections because of it.
            first = min(errors, key=lambda answer: answer.get("is_death", False))
            raise (loading.WorkloadError if first["is_input"] else RowFailed)(first["error"])
        if waiting:
            raise RowFailed(f"no answer to {verb!r} after {timeout_s:g} s")
        return [answers[rank]["value"] for rank in sorted(answers)]

    def close(self) -> None:
        """Close the pipes, on which the ranks exit, and kill what still runs after a moment."""
        for connection in self._connections:
            connection.close()
        self._ranks.close()

    def _start(self, job: CompareJob) -> None:
        ours, theirs = Pipe()
        self._connections.append(ours)
        ours.send(job)
        command = [interpreter(job.row), "-m", "shardwise.compare.worker", str(theirs.fileno())]
        self._ranks.start(command, _environment(job), pass_fds=[theirs.fileno()])
        theirs.close()

    def _answer(self, rank: int) -> dict[str, Any]:
        try:
            return cast(dict[str, Any], self._connections[rank].recv())
        except (EOFError, OSError):
            return {"error": self._ranks.describe_exit(rank, GRACE_S), "is_input": False, "is_death": True}


def _environment(job: CompareJob) -> dict[str, str]:
    settings = job.settings
    added = {
        "LOCAL_RANK": str(job.device.index or 0) if settings.device == "cuda" else str(job.rank),
        "WORLD_SIZE": str(settings.world_size),
        "LOCAL_WORLD_SIZE": str(settings.world_size),
        "MASTER_ADDR": "127.0.0.1",  # read by DeepSpeed; the ranks meet through the store
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": str(job.threads),
        "DS_ACCELERATOR": settings.device,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    if settings.device == "cpu":
        added |= launch.heap_environment()  # for every row, peers included
        added |= launch.matmul_environment() if settings.precision != "fp32" else {}
    return {**os.environ, **added}
