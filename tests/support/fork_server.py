"""Python processes that start at once, because they are forked from a server that has imported torch.

Importing torch and its compiler takes several seconds of CPU, more than most tests need. The *fork server* does it
once, in its own process, which starts at the first use and ends with pytest::

    pytest ── command, environment, files ──▶ fork server ── fork ──▶ a process, as if started as `python ...`
       ◀────────── pid (from the process), exit code (from the fork server) ──────────

A `Forked` replaces a `subprocess.Popen` of `python -m MODULE ...` or `python SCRIPT ...`. Tests of what a new
interpreter does, such as the time of an import, use subprocess.
"""

import array
import contextlib
import ctypes
import faulthandler
import fcntl
import functools
import gc
import importlib
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IMPORTS = ("torch", "torch._dynamo", "torch.distributed", "numpy", "pytest", "shardwise", "shardwise.engine.engine")
START = "from support.fork_server import main; main()"
MESSAGE_BYTES = 1 << 17
PR_SET_PDEATHSIG = 1
ABOVE_ALL = 300  # above every descriptor of these processes


@dataclass(frozen=True)
class Request:
    """A process to start: its arguments after `python`, and the descriptor numbers of the files sent along."""

    words: list[str]
    env: dict[str, str]
    cwd: str
    numbers: list[int]


class Forked:
    """A process of the fork server, with the interface of a `subprocess.Popen` that started in a new session."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: int | None = subprocess.DEVNULL,
        stdout: Any = None,
        stderr: Any = None,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = True,
    ) -> None:
        python, *words = map(str, command)
        assert (python, stdin, start_new_session) == (sys.executable, subprocess.DEVNULL, True), command
        self.args = [python, *words]
        self.returncode: int | None = None
        output = _number(stdout, 1)
        errors = output if stderr == subprocess.STDOUT else _number(stderr, 2)
        self._status, theirs = os.pipe()
        with open(os.devnull) as nothing:
            files = {0: nothing.fileno(), 1: output, 2: errors, **{number: number for number in pass_fds}}
            request = Request(words, dict(os.environ if env is None else env), str(cwd or os.getcwd()), list(files))
            self.pid = fork_server().ask(request, [theirs, *files.values()])
        os.close(theirs)

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _look(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout_s)[0]:
            code = os.read(self._status, 64)
            self.returncode = int(code) if code else -signal.SIGKILL  # the fork server died, and its processes with it
            os.close(self._status)
        return self.returncode


def _number(file: Any, default: int) -> int:
    return default if file is None else file if isinstance(file, int) else file.fileno()


class ForkServer:
    """pytest's side of the server."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, str(theirs.fileno()), str(os.getpid())],
            env={**os.environ, **single, "PYTHONPATH": path.rstrip(os.pathsep)},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self._socket = ours

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: Request, files: Sequence[int]) -> int:
        self._socket.sendmsg([pickle.dumps(request)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
        pid = self._socket.recv(64)
        if not pid:
            raise RuntimeError(f"the fork server ended with exit code {self._process.wait()}")
        return int(pid)

    def close(self) -> None:
        self._socket.close()
        self._process.kill()  # it may still be importing
        self._process.wait()


@functools.cache
def fork_server() -> ForkServer:
    """The fork server of this process, started at its first use."""
    return ForkServer()


def close_fork_server() -> None:
    if fork_server.cache_info().currsize:
        fork_server().close()
        fork_server.cache_clear()


# The server's side


def main() -> None:
    asked, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # the parent died before the line above
    for name in IMPORTS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    if sys.platform == "linux":
        # A thread that sends over Gloo holds a lock. If what it wakes takes its core, Gloo's loop spins for that lock:
        # without preemption on wake-up, the ranks of a test take a third less CPU.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    forked = serve(asked)
    if forked is None:
        os._exit(0)
    request, files = forked
    asked.close()
    set_up(request, files)
    run(request.words)


def serve(asked: socket.socket) -> tuple[Request, list[int]] | None:
    """Fork a process per request until pytest closes the socket. In a forked process: its request and its files."""
    ended, wake = os.pipe()
    for number in (ended, wake):
        os.set_blocking(number, False)
    handler = signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    statuses: dict[int, int] = {}
    while True:
        ready = select.select([asked, ended], [], [])[0]
        if ended in ready:
            os.read(ended, 4096)
            report_exits(statuses)
        if asked not in ready:
            continue
        message, ancillary, _, _ = asked.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(64 * array.array("i").itemsize))
        if not message:
            return None
        files = array.array("i")
        for _, _, data in ancillary:
            files.frombytes(data[: len(data) - len(data) % files.itemsize])
        status, *rest = files
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, handler)
            for number in (ended, wake, status, *statuses.values()):
                os.close(number)
            os.setsid()
            asked.send(str(os.getpid()).encode())  # after setsid: a kill of its group now finds it
            return pickle.loads(message), rest
        statuses[pid] = status
        for number in rest:
            os.close(number)


def report_exits(statuses: dict[int, int]) -> None:
    """Write the exit code of every process that ended to the pipe of its `Forked`."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            number = statuses.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(number, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(number)


def set_up(request: Request, files: Sequence[int]) -> None:
    """Give a forked process the files, environment, folder and streams of a new process."""
    high = [fcntl.fcntl(number, fcntl.F_DUPFD, ABOVE_ALL) for number in files]
    for number in files:
        os.close(number)
    for source, number in zip(high, request.numbers, strict=True):
        os.dup2(source, number)
        os.close(source)
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.cwd)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  (open until the process exits)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115  (open until the process exits)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    if request.env.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    time.tzset()


def run(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")
