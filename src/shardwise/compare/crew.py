"""The parent's side of a row: its processes, asked all at once, ended for certain."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from shardwise.compare.job import Job, Settings
from shardwise.compare.rows import Row, interpreter
from shardwise.machine import launch
from shardwise.models.loading import WorkloadError

TIMEOUT_S = 600.0
GRACE_S = 2.0
"""How long after a rank's failure the others may still say why they failed."""


class CrewFailed(Exception):
    """A row cannot go on: the message is what its table line shows."""


class Crew:
    """The ranks of one row in fresh processes. Use as a context manager."""

    def __init__(self, settings: Settings, row: Row) -> None:
        self.settings = settings
        self.row = row
        self._folder = tempfile.TemporaryDirectory(prefix="shardwise-compare-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []

    def __enter__(self) -> Crew:
        try:
            for rank in range(self.settings.world_size):
                self._spawn(rank)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *exception: Any) -> None:
        self.end()

    def ask(self, verb: str, *arguments: Any, timeout_s: float = TIMEOUT_S) -> list[dict[str, Any]]:
        """Every rank's answer, in rank order. The first failure ends the crew and raises `CrewFailed`."""
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(OSError):  # a rank that is gone says so when we read from it
            for connection in self._connections:
                connection.send((verb, arguments))
        while len(answers) < len(self._connections) and time.monotonic() < deadline:
            answers.update(self._receive(answers, deadline))
            if any("error" in answer for answer in answers.values()):
                deadline = min(deadline, time.monotonic() + GRACE_S)
        self._check(answers, verb, timeout_s)
        return [answers[rank]["value"] for rank in sorted(answers)]

    def end(self) -> None:
        """End what still runs, and whatever it started."""
        for connection in self._connections:
            connection.close()
        while self._processes:
            process = self._processes.pop()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._folder.cleanup()

    def _spawn(self, rank: int) -> None:
        threads = launch.threads_per_rank(self.settings.world_size)
        job = Job(self.settings, self.row, rank, str(Path(self._folder.name) / "store"), threads)
        ours, theirs = Pipe()
        self._connections.append(ours)
        command = [interpreter(self.row), "-m", "shardwise.compare.worker", job.to_json(), str(theirs.fileno())]
        with self._log(rank).open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    command,
                    env=_environment(job),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            )
        theirs.close()

    def _receive(self, answers: dict[int, dict[str, Any]], deadline: float) -> dict[int, dict[str, Any]]:
        waiting = {id(c): rank for rank, c in enumerate(self._connections) if rank not in answers}
        ready = wait([c for c in self._connections if id(c) in waiting], timeout=max(0.0, deadline - time.monotonic()))
        return {waiting[id(connection)]: self._answer(connection, waiting[id(connection)]) for connection in ready}

    def _answer(self, connection: Any, rank: int) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = connection.recv()
        except (EOFError, OSError):
            return {"error": self._death(rank), "is_input": False, "is_death": True}
        return answer

    def _death(self, rank: int) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(GRACE_S)
        code = self._processes[rank].returncode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        last = self._log(rank).read_text(errors="replace").strip().splitlines()[-1:]
        return f"rank {rank} ended with {how}{hint}" + "".join(f": {line}" for line in last)

    def _check(self, answers: dict[int, dict[str, Any]], verb: str, timeout_s: float) -> None:
        errors = {rank: answer for rank, answer in sorted(answers.items()) if "error" in answer}
        # A rank that raised says more than one that died of it.
        told = sorted(errors.values(), key=lambda answer: answer.get("is_death", False))
        if told:
            self.end()
            raise (WorkloadError if told[0]["is_input"] else CrewFailed)(told[0]["error"])
        if len(answers) < len(self._connections):
            self.end()
            raise CrewFailed(f"no answer to {verb!r} after {timeout_s:g} s")

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank{rank}.log"


def _environment(job: Job) -> dict[str, str]:
    settings = job.settings
    added = {
        "RANK": str(job.rank),
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
        added |= launch.heap_environment()  # for all rows alike
        added |= launch.matmul_environment() if settings.precision != "fp32" else {}
    return {**os.environ, **added}
