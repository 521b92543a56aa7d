"""Checks of what a command line names, made before work begins: numbers, paths to write to, files to read.

Each raises a ConfigError that names the option, what was found and what is expected.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from shardwise.errors import ConfigError

MOST_STEPS = 10**12
MOST_SAMPLES = 10**9
LARGEST_SEED = 2**63 - 1
"""The largest that every generator accepts."""


def check_range(option: str, value: float, least: float | None = None, most: float | None = None) -> None:
    """Raise a ConfigError unless `value` is from `least` to `most`; a limit that is None is left to others.

    >>> check_range("--steps", 3, 1, 10)
    """
    if least is not None and not value >= least:
        raise ConfigError(f"{option} {value}: it must be at least {least}")
    if most is not None and not value <= most:
        raise ConfigError(f"{option} {value}: it must be at most {most:g}")


def check_output_file(option: str, path: str | Path) -> None:
    """Raise a ConfigError unless a file can be created or replaced at `path`."""
    target = Path(path).absolute()
    if not target.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {target.parent}: create it, or name another")
    try:
        if not target.exists():
            target.open("xb").close()
            target.unlink()
        elif target.is_file() or target.is_dir():
            target.open("r+b").close()
        elif not os.access(target, os.W_OK):  # a device or a pipe, which opening would change
            raise PermissionError(13, os.strerror(13))
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror or error}: name another file") from None


def check_output_folder(option: str, path: str | Path) -> None:
    """Raise a ConfigError unless files can be written into `path`. Folders that are missing are created."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{option} {path}: cannot be written to: {reason}: name another folder") from None


def read_limited(path: Path, most_bytes: int) -> bytes:
    """The content of a file; a ConfigError if it cannot be read or has more than `most_bytes`."""
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(content) > most_bytes:
        raise ConfigError(f"{path}: has more than {most_bytes} bytes, too many for what it should be: check its name")
    return content
