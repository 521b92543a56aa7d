"""Commands under a time limit, with all that they started ended with them."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


class CommandFailed(Exception):
    """A command ran past its limit, or ended with an exit code that is not zero."""


def run_command(
    command: Sequence[str | Path],
    *,
    timeout: float = 60.0,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run `command` with `env` added to the environment; stdout and stderr come back as text.

    Past the limit its whole process group is ended; Python programs in it print their stacks first.
    """
    __tracebackhide__ = True
    words = [str(word) for word in command]
    process = subprocess.Popen(
        words,
        cwd=cwd,
        env={**os.environ, "PYTHONFAULTHANDLER": "1", **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        out, err = end(process)
        raise CommandFailed(f"{' '.join(words)}: no end after {timeout:g} s\n{out}\n{err}") from None
    except BaseException:
        end(process)
        raise
    if check and process.returncode:
        raise CommandFailed(f"{' '.join(words)}: exit code {process.returncode}\n{out}\n{err}")
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Abort the group, so that faulthandler speaks, then kill what is left; what it printed."""
    signal_group(process, signal.SIGABRT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=2)
    signal_group(process, signal.SIGKILL)
    return process.communicate()


def signal_group(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
