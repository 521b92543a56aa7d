"""Memory as the operating system counts it: of this machine and of this process."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal, NamedTuple


class ProcessMemory(NamedTuple):
    """The resident memory of a process, now and at its peak."""

    now_bytes: int
    peak_bytes: int


def host_bytes(key: Literal["MemTotal", "MemAvailable"]) -> int:
    """A field of /proc/meminfo; the physical memory of a machine without that file.

    >>> 0 < host_bytes("MemAvailable") <= host_bytes("MemTotal")
    True
    """
    try:
        return _kilobytes(Path("/proc/meminfo"))[key] * 1024
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def host_share_bytes() -> int:
    """What is free on this host, divided by the ranks that run here."""
    return host_bytes("MemAvailable") // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def process_memory() -> ProcessMemory:
    """The memory of this process. Without /proc, both are its peak.

    >>> 0 < process_memory().now_bytes <= process_memory().peak_bytes
    True
    """
    try:
        fields = _kilobytes(Path("/proc/self/status"))
    except OSError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return ProcessMemory(peak, peak)
    return ProcessMemory(fields["VmRSS"] * 1024, fields["VmHWM"] * 1024)


def _kilobytes(path: Path) -> dict[str, int]:
    """The lines `name: number kB` of a file below /proc."""
    words = (line.split() for line in path.read_text().splitlines() if line.endswith("kB"))
    return {name.rstrip(":"): int(number) for name, number, _ in words}
