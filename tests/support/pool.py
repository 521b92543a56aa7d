"""The processes behind a multi-process test: started once, watched while they run, killed when in doubt.

A `Pool` belongs to one world size. The store through which its ranks meet lives in pytest's own process, as it lives
in torchrun's agent: the port is free by construction, and no rank's death takes the store along.
"""

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from support.fork_server import Forked, fork_server
from support.protocol import Finished, Job, Ready, Reply, Setup, receive, send

START_LIMIT_S = 50.0
TORCHRUN_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OUTPUT_LIMIT = 6000


@dataclass
class Outcome:
    """How one rank ended: with a value, an error (its traceback), a skip, an exit code, or still running (none)."""

    rank: int
    value: Any = None
    error: str | None = None
    skipped: str | None = None
    exitcode: int | None = None
    finished: bool = False
    stacks: str = ""
    output: str = ""

    @property
    def ok(self) -> bool:
        return self.finished and self.error is None and self.skipped is None

    def describe(self) -> str:
        parts = [f"-- rank {self.rank}: {self._headline()}"]
        parts += [self.error] if self.error else []
        parts += [f"stacks:\n{self.stacks}"] if self.stacks else []
        parts += [f"output:\n{self.output[-OUTPUT_LIMIT:]}"] if self.output else []
        return "\n".join(part.rstrip() for part in parts)

    def _headline(self) -> str:
        if self.exitcode is not None:
            name = signal.Signals(-self.exitcode).name if self.exitcode < 0 else f"exit code {self.exitcode}"
            return f"died ({name})"
        if self.error:
            return "raised"
        if self.skipped is not None:
            return f"skipped: {self.skipped}"
        return "finished" if self.finished else "still running"


def _is_whole(stacks: str) -> bool:
    _, _, last = stacks.partition("Current thread ")
    return last.endswith(" in <module>\n")


class Worker:
    """One rank's process, its pipe, and the files that take its output and its stacks."""

    def __init__(self, setup: Setup, ours: Connection, theirs: Connection, folder: Path, torchrun: bool) -> None:
        self.rank = setup.rank
        self.connection = ours
        self.output_path = folder / f"output{setup.rank}"
        self.stacks_path = Path(setup.stacks_path)
        with self.output_path.open("ab") as output:
            self.process = Forked(  # in a session of its own: Ctrl-C goes to pytest alone, a kill reaches grandchildren
                [sys.executable, "-m", "support.worker", pickle.dumps(setup).hex()],
                env=worker_environment(setup, torchrun),
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
            )
        theirs.close()

    def receive(self) -> Ready | Reply | None:
        """The message that is there; None when the process is dead or about to be."""
        with contextlib.suppress(EOFError, OSError):
            if self.connection.poll():
                return receive(self.connection)
        return None

    def read_output(self) -> str:
        return self.output_path.read_text(errors="replace")

    def dump_stacks(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)

    def read_stacks(self) -> str:
        """The dump that was asked for. The thread that took the signal, the last in it, ends at the program's entry."""
        deadline = time.monotonic() + 10
        while self.process.poll() is None and time.monotonic() < deadline and not _is_whole(self._stacks()):
            time.sleep(0.01)
        return self._stacks()

    def _stacks(self) -> str:
        return self.stacks_path.read_text(errors="replace") if self.stacks_path.exists() else ""

    def exitcode(self) -> int | None:
        """Of a process whose pipe is closed; the pipe closes a moment before the process ends."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout=2)
        return None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()


class Pool:
    """`world_size` workers that run one job at a time. After any failure it is `spent`: close it, make another."""

    def __init__(self, world_size: int, *, init: bool = True, torchrun: bool = True) -> None:
        self.world_size = world_size
        self.spent = False
        self.folder = Path(tempfile.mkdtemp(prefix="shardwise-ranks-"))
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.workers = [self._start(rank, init, torchrun) for rank in range(world_size)]
        try:
            self._await_ready()
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, init: bool, torchrun: bool) -> Worker:
        ours, theirs = Pipe()
        stacks_path = str(self.folder / f"stacks{rank}")
        setup = Setup(rank, self.world_size, fork_server().pid, theirs.fileno(), self.store.port, stacks_path, init)
        return Worker(setup, ours, theirs, self.folder, torchrun)

    def _await_ready(self) -> None:
        replies = self._collect(START_LIMIT_S, grace_s=0.5)
        self.start_s = max((r.start_s for r in replies.values()), default=0.0)
        if len(replies) < self.world_size:
            outcomes = self._outcomes({})
            text = "\n".join(outcome.describe() for outcome in outcomes)
            raise RuntimeError(f"{self.world_size} workers did not start within {START_LIMIT_S:g} s\n{text}")

    def run(self, job: Job, timeout_s: float, grace_s: float) -> list[Outcome]:
        """The outcome of every rank; those that failed first come first.

        Once one rank has failed, the others get `grace_s` more to end by themselves.
        """
        try:
            for worker in self.workers:
                os.truncate(worker.output_path, 0)
                with contextlib.suppress(OSError):  # dead already: told by its exit code below
                    send(worker.connection, job)
            replies = self._collect(timeout_s, grace_s)
        except BaseException:  # pytest-timeout or Ctrl-C: the workers are busy with a job nobody waits for
            self.spent = True
            raise
        skips = sum(reply.skipped is not None for reply in replies.values())
        failed = len(replies) < self.world_size or any(reply.error for reply in replies.values())
        self.spent = failed or skips not in (0, self.world_size)
        if not self.spent:
            for worker in self.workers:
                with contextlib.suppress(OSError):
                    send(worker.connection, Finished())
        return self._outcomes(replies)

    def _collect(self, timeout_s: float, grace_s: float) -> dict[int, Any]:
        """Messages by rank, in order of arrival, until all are in, the time is over, or a failure's grace is."""
        pending = list(self.workers)
        self.ended: list[Worker] = []
        replies: dict[int, Any] = {}
        deadline, failed = time.monotonic() + timeout_s, False
        while pending and time.monotonic() < deadline:
            readable = wait([worker.connection for worker in pending], timeout=0.1)
            # The exit code counts too: a process that a rank forked can hold its pipe open after its death.
            for worker in [w for w in pending if w.connection in readable or w.process.poll() is not None]:
                pending.remove(worker)
                self.ended.append(worker)
                reply = worker.receive()
                if reply is not None:
                    replies[worker.rank] = reply
                if not failed and (reply is None or getattr(reply, "error", None)):
                    failed, deadline = True, min(deadline, time.monotonic() + grace_s)
        return replies

    def _outcomes(self, replies: dict[int, Reply]) -> list[Outcome]:
        """Those that died or raised, in that order of time; those still running; those that finished."""
        hung = [worker for worker in self.workers if worker not in self.ended]
        for worker in hung:
            worker.dump_stacks()
        finished = [w for w in self.ended if w.rank in replies and not replies[w.rank].error]
        failed = [w for w in self.ended if w not in finished]
        return [self._outcome(worker, replies.get(worker.rank)) for worker in failed + hung + finished]

    def _outcome(self, worker: Worker, reply: Reply | None) -> Outcome:
        output = worker.read_output()
        if reply is None:
            exitcode = worker.exitcode() if worker in self.ended else None
            return Outcome(worker.rank, exitcode=exitcode, stacks=worker.read_stacks(), output=output)
        value = pickle.loads(reply.value) if reply.value is not None else None
        return Outcome(worker.rank, value, reply.error, reply.skipped, finished=True, output=output)

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def worker_environment(setup: Setup, torchrun: bool) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in TORCHRUN_NAMES}
    python_path = os.pathsep.join([str(Path(__file__).parent.parent), environment.get("PYTHONPATH", "")])
    environment |= {"PYTHONPATH": python_path.rstrip(os.pathsep), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    if torchrun:
        rank, size = str(setup.rank), str(setup.world_size)
        values = (rank, rank, size, size, "127.0.0.1", str(setup.port))
        environment |= dict(zip(TORCHRUN_NAMES, values, strict=True))
        environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return environment
