"""Commands under a time limit, with all that they started ended with them."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from support.fork_server import Forked


class CommandFailed(Exception):
    """A command ran past its limit, or ended with an exit code that is not zero."""


def run_command(
    command: Sequence[str | Path],
    *,
    timeout: float = 60.0,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    check: bool = True,
    forked: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `command` with `env` added to the environment; stdout and stderr come back as text.

    Past the limit its whole process group is ended; Python programs in it print their stacks first. `forked` takes a
    process of the fork server.
    """
    __tracebackhide__ = True
    words = [str(word) for word in command]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = (Forked if forked else subprocess.Popen)(
            words,
            cwd=cwd,
            env={**os.environ, "PYTHONFAULTHANDLER": "1", **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            process.wait(timeout=timeout)
        except subprocess.TimeoutExpired:
            end(process)
            raise CommandFailed(f"{' '.join(words)}: no end after {timeout:g} s\n{told(output, errors)}") from None
        except BaseException:
            end(process)
            raise
        if check and process.returncode:
            raise CommandFailed(f"{' '.join(words)}: exit code {process.returncode}\n{told(output, errors)}")
        return subprocess.CompletedProcess(words, process.returncode or 0, text_of(output), text_of(errors))


def text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def told(output: IO[bytes], errors: IO[bytes]) -> str:
    return f"{text_of(output)}\n{text_of(errors)}"


def end(process: subprocess.Popen[bytes] | Forked) -> None:
    """Abort the group, so that faulthandler speaks, then kill what is left."""
    signal_group(process, signal.SIGABRT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=2)
    signal_group(process, signal.SIGKILL)
    process.wait()


def signal_group(process: subprocess.Popen[bytes] | Forked, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
