"""Which process a rank is, so that other ranks on its host can see whether it lives, is stopped or has died.

It also starts the threads that run during training: they end before the interpreter does.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PARENT_POLL_S = 1.0
END_GRACE_S = 30.0
"""How long a rank whose launcher died may take to end after SIGTERM, as under torchrun."""
JOIN_S = 10.0
_STATE, _STARTED, _EXIT = 0, 19, 49  # fields of /proc/PID/stat after the name


class Condition(enum.Enum):
    """What another process sees of one: it LIVES, is STOPPED, is BLOCKED in the kernel, has ENDED, or is UNKNOWN."""

    LIVES = "lives"
    STOPPED = "stopped"
    BLOCKED = "blocked"
    ENDED = "ended"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Identity:
    """A process. Two processes can look at each other if they have the same `view`: one kernel, one set of numbers.

    `started` tells it from a later process with its number; `log` is the file that its errors go to, if any.
    """

    view: str
    host: str
    pid: int
    started: int
    log: str

    @classmethod
    def of_this_process(cls) -> Identity:
        view = ""
        with contextlib.suppress(OSError):
            view = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
        fields = _stat(os.getpid())
        return cls(view, socket.gethostname(), os.getpid(), int(fields[_STARTED]) if fields else 0, _log())

    def look(self) -> tuple[Condition, str]:
        """The condition of the process, seen from this one, and the words for it."""
        who = f"its process ({self.pid} on {self.host})"
        if not self.view or self.view != Identity.of_this_process().view:
            return Condition.UNKNOWN, f"{who} does not answer: it has died or stands still, or its host is unreachable"
        fields = _stat(self.pid)
        if not fields or int(fields[_STARTED]) != self.started:
            return Condition.ENDED, f"{who} has died"
        state = fields[_STATE]
        if state in "ZX":
            return Condition.ENDED, f"{who} {describe_end(os.waitstatus_to_exitcode(int(fields[_EXIT])))}"
        if state in "Tt":
            return Condition.STOPPED, f"{who} is stopped (SIGSTOP, Ctrl-Z or a debugger)"
        if state == "D":
            return Condition.BLOCKED, f"{who} is blocked in the kernel (state D): a disk or a mount that hangs?"
        return Condition.LIVES, f"{who} runs but does not answer: does a call hold Python's lock?"


def describe_end(code: int) -> str:
    """Words for an exit code as `subprocess` gives it.

    >>> describe_end(-9), describe_end(3)
    ('was ended by signal SIGKILL (out of memory?)', 'ended with exit code 3')
    """
    return f"{'was ended by' if code < 0 else 'ended with'} {name_of_end(code)}"


def name_of_end(code: int | None) -> str:
    """The signal of an exit code as `subprocess` gives it, or the code."""
    if code is None or code >= 0:
        return f"exit code {code}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"signal {signal.Signals(-code).name}{hint}"


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name; empty if there is no such process, or no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _log() -> str:
    """The file that this process writes its errors to; empty if that is no file."""
    with contextlib.suppress(OSError):
        path = os.readlink("/proc/self/fd/2")
        if os.path.isfile(path):
            return path
    return ""


# Threads

_running: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def start_thread(target: Callable[..., None], *args: Any, name: str) -> threading.Thread:
    """Start a thread that does not keep the process alive, and is joined before the interpreter ends.

    A daemon thread that is inside torch while the interpreter ends aborts the process. `target` has to end soon once
    its owner says so: at exit it is waited for `JOIN_S` seconds at most.
    """
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    _running.add(thread)
    thread.start()
    return thread


def leave_behind(thread: threading.Thread) -> None:
    """Do not wait for a thread at exit: it is in a system call that never returns."""
    _running.discard(thread)


def _join_threads() -> None:
    deadline = time.monotonic() + JOIN_S
    for thread in list(_running):
        thread.join(max(0.0, deadline - time.monotonic()))


atexit.register(_join_threads)  # before any owner's handler, so that it runs after them


def ending_error() -> BaseException | None:
    """At exit: the exception that ends this process, if one does."""
    error: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error


# The launcher

_launcher_watched = threading.Event()


def end_with_launcher() -> None:
    """Under torchrun: end this process if the agent that started it dies, even by SIGKILL. May be called again."""
    if "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ and not _launcher_watched.is_set():
        _launcher_watched.set()
        is_ending = threading.Event()
        atexit.register(is_ending.set)
        start_thread(_watch_parent, os.getpid(), os.getppid(), is_ending, name="shardwise-launcher")


def _watch_parent(process: int, parent: int, is_ending: threading.Event) -> None:
    while not is_ending.wait(PARENT_POLL_S):
        if os.getppid() != parent:
            text = f"shardwise: the process that started this rank ({parent}) has died: process {process} ends too\n"
            with contextlib.suppress(OSError):  # its terminal may be gone
                sys.stderr.write(text)
                sys.stderr.flush()
            os.kill(process, signal.SIGTERM)
            is_ending.wait(END_GRACE_S)  # a handler may save; a main thread that is stuck never runs it
            os.kill(process, signal.SIGKILL)
