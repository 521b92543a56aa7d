"""What this machine has: versions, devices, links, measured bandwidths, and what is missing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from shardwise._version import __version__
from shardwise.errors import ConfigError
from shardwise.machine import bandwidth
from shardwise.machine.bandwidth import COPY_BYTES, DISK_BYTES
from shardwise.machine.launch import SAFE_ISA, bf16_products_work, cores, cpu_field
from shardwise.machine.memory import host_bytes
from shardwise.sizes import format_bytes

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
        lines += ["hardware", *(f"  {name:<36}{_shown(value)}" for name, value in self.hardware.items())]
        for title, rates in (("bandwidth, GB/s", self.bandwidth_gbs), ("links between GPUs, GB/s", self.links_gbs)):
            if rates:
                lines += [title, *(f"  {name:<36}{rate:.1f}" for name, rate in rates.items())]
        return "\n".join([*lines, "notes", *(f"  {note}" for note in self.notes or ["nothing is missing"])])


def inspect(
    disk: Path | None = None, measure: bool = True, copy_bytes: int = COPY_BYTES, disk_bytes: int = DISK_BYTES
) -> Environment:
    """Describe this machine. `measure` times its memory, its devices and, if `disk` is a folder, the disk below it."""
    found = Environment(versions(), hardware(), notes=notes())
    if disk is not None and not disk.is_dir():
        raise ConfigError(f"--disk {disk}: there is no such folder")
    if measure:
        found.bandwidth_gbs = {"host memory copy": bandwidth.host_copy_gbs(copy_bytes)}
        found.bandwidth_gbs |= bandwidth.host_device_gbs(copy_bytes)
        found.links_gbs = bandwidth.device_links_gbs(copy_bytes)
        if disk is not None:
            found.bandwidth_gbs |= bandwidth.disk_gbs(disk, disk_bytes)
    if disk is None:
        found.notes.append("the disk was not measured: name a folder on it with --disk")
    return found


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


def check_device(name: str) -> None:
    """Raise a ConfigError if this machine has no such device."""
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"unknown device {name!r}: choose cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda: torch finds no CUDA device here (`shardwise env` says more)")


def free_device_bytes() -> int:
    """Free memory of all GPUs together."""
    return sum(torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count()))


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


def _shown(value: Any) -> str:
    return format_bytes(value) if isinstance(value, int) and value > 2**20 else str(value)
