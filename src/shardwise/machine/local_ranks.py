"""Ranks on this machine, one process each: started together, stopped together, none left behind.

`shardwise train` and `shardwise compare` start their ranks with `LocalRanks`. Each rank runs in its own session, so
Ctrl-C reaches it only through this process, and writes to a log, whose last line is shown when the rank dies. A rank
that catches its own failure leaves a `FailureReport` in the folder that it finds in its environment.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.machine.process import name_of_end

if TYPE_CHECKING:  # the command that starts ranks does not load torch
    import torch
    from torch._C._distributed_c10d import Store

FOLDER = "SHARDWISE_RANKS_FOLDER"
"""The environment variable that names the folder of the ranks: their logs and failure reports."""
PARENT = "SHARDWISE_RANKS_PARENT"
POLL_S = 0.05
FAILURE_GRACE_S = 5.0
"""How long the other ranks may continue after one has failed."""
PR_SET_PDEATHSIG = 1
LAST = 1e9


@dataclass(frozen=True)
class FailureReport:
    """Why a rank failed. `order` is the time of the failure, with consequences of another rank's failure last."""

    message: str
    order: float

    @classmethod
    def write(cls, folder: Path, rank: int, message: str, is_consequence: bool) -> None:
        """Leave a report for the process that started this rank."""
        report = cls(message, time.time() + (LAST if is_consequence else 0.0))
        _report_path(folder, rank).write_text(json.dumps(asdict(report)))

    @classmethod
    def read(cls, folder: Path, rank: int) -> FailureReport | None:
        """The report of a rank; None if it left none, or died while writing it."""
        try:
            found = json.loads(_report_path(folder, rank).read_text())
            return cls(str(found["message"]), float(found["order"]))
        except (OSError, ValueError, TypeError, LookupError):
            return None


class LocalRanks(contextlib.AbstractContextManager["LocalRanks"]):
    """The processes of one run on this machine. Use as a context manager: leaving it kills every rank that still runs.

    `grace_s`: how long a rank may take to exit by itself before it is killed.
    """

    def __init__(self, name: str, grace_s: float = 0.0) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix=f"shardwise-{name}-")
        self._grace_s = grace_s
        self._processes: list[subprocess.Popen[bytes]] = []
        self._unkilled: list[subprocess.Popen[bytes]] = []
        self.folder = Path(self._temporary.name)
        self.stop_requests = 0

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def close(self) -> None:
        """End what still runs and remove the folder. May be called again."""
        self.kill()
        self._temporary.cleanup()

    def start(self, command: Sequence[str], environment: Mapping[str, str], **options: Any) -> None:
        """Start the next rank, with `options` of Popen. Its output goes to its log; `stdout=None` leaves it on ours."""
        rank = len(self._processes)
        own = {"RANK": str(rank), FOLDER: str(self.folder), PARENT: str(os.getpid())}
        with self._log(rank).open("wb") as log:
            options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True, **options}
            self._processes.append(subprocess.Popen(command, env={**environment, **own}, **options))
        self._unkilled.append(self._processes[-1])

    def wait(self) -> None:
        """Wait until every rank has exited. A failure or a second request to stop kills those that still run."""
        deadline = float("inf")
        while any([process.poll() is None for process in self._processes]) and self.stop_requests < 2:  # noqa: C419  (polls all)
            now = time.monotonic()
            self._record_exits()
            if any(process.returncode for process in self._processes):
                deadline = min(deadline, now + FAILURE_GRACE_S)
            if now >= deadline:
                break
            time.sleep(POLL_S)
        self.kill()

    def _record_exits(self) -> None:
        """Let the ranks that still run know how others ended; see `recorded_exit`."""
        for rank, code in enumerate(self.exit_codes):
            path = _exit_path(self.folder, rank)
            if code is not None and not path.exists():
                path.write_text(str(code))

    def kill(self) -> None:
        """End every rank that still runs, and the processes that it started."""
        while self._unkilled:  # each once: later, another process may have its number
            process = self._unkilled.pop()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self._grace_s)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def request_stop(self) -> None:
        """The first request asks the ranks to save and exit; the second makes `wait` kill them."""
        self.stop_requests += 1
        if self.stop_requests == 1:
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)

    @contextlib.contextmanager
    def stopping_on_signals(self) -> Iterator[None]:
        """Within it, Ctrl-C, SIGTERM and a closed terminal request a stop."""
        before = {number: signal.signal(number, lambda *_: self.request_stop()) for number in stop_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def exit_codes(self) -> list[int | None]:
        """The exit code of every rank, None while it runs; minus a signal's number if that ended it."""
        return [process.returncode for process in self._processes]

    def failure(self) -> tuple[int, str] | None:
        """Exit code and message of the failure that explains the others: a death, else the earliest report."""
        failures = []
        for rank, code in enumerate(self.exit_codes):
            if code:
                report = FailureReport.read(self.folder, rank)
                failures.append((report.order, code, report.message) if report else (-1.0, 1, self.describe_exit(rank)))
        return min(failures, key=lambda failure: failure[0])[1:] if failures else None

    def describe_exit(self, rank: int, timeout_s: float = 0.0) -> str:
        """How a rank ended, with the last line of its log. Waits up to `timeout_s` for the exit."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(timeout_s)
        how = name_of_end(self._processes[rank].returncode)
        last = self._log(rank).read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        return f"rank {rank} ended with {how}" + "".join(f": {line}" for line in last)

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"


def stop_signals() -> list[signal.Signals]:
    """The signals that ask a run to save and exit. SIGHUP is not one of them under `nohup`, which ignores it."""
    hangup = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    return [signal.SIGINT, signal.SIGTERM, *hangup]


def join(rank: int, device: torch.device, timeout: timedelta) -> Store:
    """In a rank: start the process group through the folder of local ranks or torchrun's rendezvous; returns the
    store."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore
    from torch.distributed.rendezvous import rendezvous

    world_size = int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    has_own_gpu = device.type == "cuda" and local <= torch.cuda.device_count()  # NCCL needs one GPU per rank
    backend = "cpu:gloo,cuda:nccl" if has_own_gpu else "gloo"
    folder = os.environ.get(FOLDER)
    store: Store = FileStore(f"{folder}/store", world_size) if folder else next(iter(rendezvous("env://")))[0]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return store


def stop_with_parent() -> None:
    """In a rank: receive SIGTERM when the process that started it dies, even by SIGKILL. On Linux only."""
    if (parent := os.environ.get(PARENT)) is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it died before prctl took effect
        os.kill(os.getpid(), signal.SIGTERM)


def _report_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"


def _exit_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.exit"


def recorded_exit(rank: int) -> int | None:
    """In a rank: how another one ended, if the process that started them has seen it."""
    with contextlib.suppress(KeyError, OSError, ValueError):
        return int(_exit_path(Path(os.environ[FOLDER]), rank).read_text())
    return None
