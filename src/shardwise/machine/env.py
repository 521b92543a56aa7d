"""What this machine has: versions, devices, links, measured bandwidths in GB/s (1e9 bytes), and what is missing."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import mmap
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import torch

from shardwise._version import __version__
from shardwise.checks import check_output_folder
from shardwise.errors import ConfigError
from shardwise.machine.launch import SAFE_ISA, bf16_products_work, cores, cpu_field
from shardwise.machine.memory import host_bytes
from shardwise.sizes import format_bytes

COPY_BYTES = 1 << 28
DISK_BYTES = 1 << 30
BLOCK_BYTES = 1 << 20
DISK_THREADS = 8
REPEATS = 5
PACKAGES = {
    "matplotlib": "plots: pip install 'shardwise[plot]'",
    "transformers": "Hugging Face models: pip install 'shardwise[hf]'",
    "accelerate": "Hugging Face trainers: pip install 'shardwise[hf]'",
    "peft": "adapters: pip install 'shardwise[hf]'",
    "deepspeed": "only as a peer in comparisons: make bench-env",
}


@dataclass
class Environment:
    """Everything that `shardwise env` prints."""

    versions: dict[str, str]
    hardware: dict[str, Any]
    bandwidth_gbs: dict[str, float] = field(default_factory=dict)
    links_gbs: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(self.__dict__, indent=1)

    def __str__(self) -> str:
        lines = ["versions", *(f"  {name:<36}{value}" for name, value in self.versions.items())]
        memory = {"memory_bytes": format_bytes(self.hardware["memory_bytes"])}
        lines += ["hardware", *(f"  {name:<36}{value}" for name, value in (self.hardware | memory).items())]
        for title, rates in (("bandwidth, GB/s", self.bandwidth_gbs), ("links between GPUs, GB/s", self.links_gbs)):
            if rates:
                lines += [title, *(f"  {name:<36}{rate:.1f}" for name, rate in rates.items())]
        return "\n".join([*lines, "notes", *(f"  {note}" for note in self.notes or ["nothing is missing"])])


def inspect(
    disk: Path | None = None, measure: bool = True, copy_bytes: int = COPY_BYTES, disk_bytes: int = DISK_BYTES
) -> Environment:
    """Describe this machine. `measure` times its memory, its devices and, if `disk` is a folder, the disk below it."""
    if disk is not None:
        _check_disk(disk, disk_bytes if measure else 0)
    found = Environment(versions(), hardware(), notes=notes())
    if measure:
        found.bandwidth_gbs = {"host memory copy": host_copy_gbs(copy_bytes)}
        found.bandwidth_gbs |= host_device_gbs(copy_bytes)
        found.links_gbs = device_links_gbs(copy_bytes)
        if disk is not None:
            found.bandwidth_gbs |= disk_gbs(disk, disk_bytes)
    if disk is None:
        found.notes.append("the disk was not measured: name a folder on it with --disk")
    return found


def _check_disk(folder: Path, needed_bytes: int) -> None:
    if not folder.is_dir():
        raise ConfigError(f"--disk {folder}: there is no such folder: name one that exists")
    check_output_folder("--disk", folder)
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        needed = format_bytes(needed_bytes)
        raise ConfigError(f"--disk {folder}: {needed} are written there, and {format_bytes(free)} are free: free some")


def versions() -> dict[str, str]:
    """The versions of every installed package that affects a result."""
    found = {"shardwise": __version__, "python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found | {name: version for name in PACKAGES if (version := _version(name))}


def hardware() -> dict[str, Any]:
    """Processor, cores, memory and GPUs."""
    found: dict[str, Any] = {"cpu": cpu_field("model name") or platform.processor() or sys.platform}
    found |= {"cores": cores(), "memory_bytes": host_bytes("MemTotal")}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = f"{properties.name}, {format_bytes(properties.total_memory)}"
    return found


def made() -> dict[str, Any]:
    """Date, commit and hardware, for the head of a result file."""
    return {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "commit": _commit(), "hardware": hardware()}


def notes(packages: Mapping[str, str] = PACKAGES, bf16_works: Callable[[], bool] = bf16_products_work) -> list[str]:
    """What is missing or wrong on this machine, and what to do about it."""
    found = [f"{name} is not installed ({use})" for name, use in packages.items() if _version(name) is None]
    if not bf16_works() and not set(SAFE_ISA) & set(os.environ):
        setting = next(f"{name}={value}" for name, value in SAFE_ISA.items())
        found.append(f"bf16 matrix products crash here: set {setting} (`shardwise run` and `compare` do it)")
    if not torch.cuda.is_available():
        why = "torch was built without CUDA" if torch.version.cuda is None else "no driver or no GPU responds"
        found.append(f"no CUDA device: {why}")
    if os.environ.get("OMP_NUM_THREADS") == "1" and cores() > 1:
        found.append(f"OMP_NUM_THREADS=1 leaves {cores() - 1} of {cores()} cores idle in host updates")
    return found


def host_copy_gbs(copy_bytes: int = COPY_BYTES) -> float:
    """A copy in host memory with all threads: bytes read plus bytes written."""
    source = torch.ones(copy_bytes, dtype=torch.uint8)
    return _gbs(2 * copy_bytes, partial(torch.empty_like(source).copy_, source))


def host_device_gbs(copy_bytes: int = COPY_BYTES) -> dict[str, float]:
    """Pinned host memory to the first GPU, back, and both at once; empty without a GPU."""
    if not torch.cuda.is_available():
        return {}
    host = [torch.empty(copy_bytes, dtype=torch.uint8).pin_memory() for _ in range(2)]
    device = [torch.empty(copy_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    up, down = (device[0], host[0], torch.cuda.Stream()), (host[1], device[1], torch.cuda.Stream())
    return {
        "host to device": _gbs(copy_bytes, partial(_copy_on_streams, up)),
        "device to host": _gbs(copy_bytes, partial(_copy_on_streams, down)),
        "both at once": _gbs(2 * copy_bytes, partial(_copy_on_streams, up, down)),
    }


def _copy_on_streams(*copies: tuple[torch.Tensor, torch.Tensor, torch.cuda.Stream]) -> None:
    for target, source, stream in copies:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)


def device_links_gbs(copy_bytes: int = COPY_BYTES) -> dict[str, float]:
    """A copy from every GPU to every other."""
    rates = {}
    for pair in permutations(range(torch.cuda.device_count()), 2):
        source, target = (torch.empty(copy_bytes, dtype=torch.uint8, device=f"cuda:{index}") for index in pair)
        rates[f"cuda:{pair[0]} to cuda:{pair[1]}"] = _gbs(copy_bytes, partial(target.copy_, source))
    return rates


def disk_gbs(folder: Path, size_bytes: int = DISK_BYTES) -> dict[str, float]:
    """Writing and reading a file below `folder` with 8 threads, past the page cache (O_DIRECT) if possible."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="shardwise-env-") as inside:
        path = Path(inside) / "data"
        path.touch()
        direct = getattr(os, "O_DIRECT", 0)
        try:
            os.close(os.open(path, os.O_RDWR | direct))
        except OSError:
            direct = 0
        how = f"{DISK_THREADS} threads" + (", O_DIRECT" if direct else ", through the page cache")
        rates = {}
        for name, flags, transfer in (("write", os.O_WRONLY, os.pwritev), ("read", os.O_RDONLY, os.preadv)):
            seconds = _disk_s(path, flags | direct, transfer, size_bytes)
            rates[f"disk {name} ({how})"] = size_bytes / seconds / 1e9
        return rates


def _disk_s(path: Path, flags: int, transfer: Callable[..., int], size_bytes: int) -> float:
    part = size_bytes // DISK_THREADS // BLOCK_BYTES * BLOCK_BYTES

    def work(index: int) -> None:
        handle = os.open(path, flags)
        # O_DIRECT requires aligned buffers; anonymous maps start on a page boundary.
        with contextlib.closing(mmap.mmap(-1, BLOCK_BYTES)) as block:
            for offset in range(index * part, (index + 1) * part, BLOCK_BYTES):
                transfer(handle, [block], offset)
        if flags & os.O_WRONLY:
            os.fsync(handle)
        os.close(handle)

    start = time.perf_counter()
    with ThreadPoolExecutor(DISK_THREADS) as pool:
        list(pool.map(work, range(DISK_THREADS)))
    return time.perf_counter() - start


def _gbs(size_bytes: int, work: Callable[[], object]) -> float:
    """The rate of the fastest of several repetitions of `work`, which moves `size_bytes`."""
    times = []
    for _ in range(REPEATS):
        _synchronize()
        start = time.perf_counter()
        work()
        _synchronize()
        times.append(time.perf_counter() - start)
    return size_bytes / min(times) / 1e9


def _synchronize() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout that contains this package, followed by a plus if files differ from it.

    The environment variable SHARDWISE_COMMIT names the commit of a copy without git history.
    """
    if named := os.environ.get("SHARDWISE_COMMIT"):
        return named
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=10"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
