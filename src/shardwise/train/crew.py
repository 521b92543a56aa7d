"""The ranks of this machine, as processes of ours: signals passed on once, failures told once, nobody left behind.

Rank 0 writes to the terminal; what others say goes to a log that is looked at when one of them dies. Ranks have a
session of their own, so that Ctrl-C reaches them through us and only once.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from shardwise.machine import launch
from shardwise.train.options import Options

FOLDER = "SHARDWISE_TRAIN_CREW"
"""The environment variable by which a rank knows its crew: a folder with the store and the ranks' last words."""
POLL_S = 0.05
GRACE_S = 5.0
"""How long the others may take once a rank has failed."""
PARENT = "SHARDWISE_TRAIN_CREW_PID"
PR_SET_PDEATHSIG = 1


class Crew:
    """The local ranks of one run."""

    def __init__(self, options: Options, world_size: int, on_cpu: bool) -> None:
        self._options = options
        self._world_size = world_size
        self._on_cpu = on_cpu
        self._processes: list[subprocess.Popen[bytes]] = []
        self._signals = 0

    def run(self) -> int:
        """Start the ranks and wait for their end. The exit code: 0, or that of a failure that has been told."""
        with tempfile.TemporaryDirectory(prefix="shardwise-train-") as name, self._handling_signals():
            folder = Path(name)
            try:
                for rank in range(self._world_size):
                    self._processes.append(self._spawn(rank, folder))
                self._wait()
            finally:
                self._end()
            return self._tell(folder)

    def _spawn(self, rank: int, folder: Path) -> subprocess.Popen[bytes]:
        environment = self._environment() | {"RANK": str(rank), "LOCAL_RANK": str(rank), FOLDER: str(folder)}
        environment[PARENT] = str(os.getpid())
        with (folder / f"rank{rank}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "shardwise.train.worker", self._options.model_dump_json()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=None if rank == 0 else log,
                stderr=log,
                start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        ours = {"WORLD_SIZE": str(self._world_size), "LOCAL_WORLD_SIZE": str(self._world_size)}
        heap = launch.heap_environment() if self._on_cpu else {}
        return launch.run_environment(self._world_size) | heap | ours

    def _wait(self) -> None:
        """Until all have ended; a while after the first failure, no longer."""
        deadline = float("inf")
        while any(process.poll() is None for process in self._processes) and time.monotonic() < deadline:
            if any(process.returncode for process in self._processes):
                deadline = min(deadline, time.monotonic() + GRACE_S)
            if self._signals > 1:
                return
            time.sleep(POLL_S)

    def _end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._pass_on) for number in stopping()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """The first signal asks the ranks to save and leave, the second ends them."""
        self._signals += 1
        if self._signals == 1:
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)

    def _tell(self, folder: Path) -> int:
        """Show one failure, the one that explains the others; the exit code."""
        if self._signals > 1:
            print("ended at once: what was trained since the last checkpoint is lost", file=sys.stderr)
            return 130
        if self._signals and any(process.returncode == -signal.SIGTERM for process in self._processes):
            print("stopped before the first step")  # by a signal that came before the ranks could take it
            return 0
        failures = sorted((self._failure(rank, folder) for rank in range(self._world_size)), key=lambda each: each[0])
        _, code, message = failures[0]
        if code:
            print(f"error: {message}", file=sys.stderr)
        return code

    def _failure(self, rank: int, folder: Path) -> tuple[float, int, str]:
        """When it failed (deaths first, lost connections last), its exit code and what to say."""
        code = self._processes[rank].returncode
        if code == 0:
            return float("inf"), 0, ""
        words = LastWords.read(folder, rank)
        if words:
            return words["order"], code, words["message"]
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        last = (folder / f"rank{rank}.log").read_text(errors="replace").strip().splitlines()[-1:]
        return -1.0, 1, f"rank {rank} ended with {how}{hint}" + "".join(f": {line}" for line in last)


def stopping() -> list[signal.Signals]:
    """The signals that ask a run to save and leave; not a closed terminal's where `nohup` has switched that off."""
    hung_up = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    return [signal.SIGINT, signal.SIGTERM, *hung_up]


def leave_with_parent() -> None:
    """In a rank: get SIGTERM, save and leave when the crew dies without a word (SIGKILL). On Linux only."""
    if (parent := os.environ.get(PARENT)) is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it was gone before we could ask
        os.kill(os.getpid(), signal.SIGTERM)


class LastWords:
    """What a failing rank leaves for its crew."""

    @staticmethod
    def write(folder: Path, rank: int, message: str, is_consequence: bool) -> None:
        order = time.time() + (1e9 if is_consequence else 0)
        (folder / f"rank{rank}.json").write_text(json.dumps({"message": message, "order": order}))

    @staticmethod
    def read(folder: Path, rank: int) -> dict[str, Any] | None:
        try:
            words: dict[str, Any] = json.loads((folder / f"rank{rank}.json").read_text())
        except (OSError, ValueError):
            return None
        return words
