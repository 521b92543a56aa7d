"""What there is to train on."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.errors import ConfigError
from shardwise.sizes import format_bytes

CONTEXT_BYTES = 500 * 10**6
"""What the CUDA driver and torch's kernels take on a GPU before the first tensor: 0.4 to 0.6 GB on recent ones."""
COMMUNICATOR_BYTES = 150 * 10**6
"""NCCL's buffers: a few MB per channel and peer, two communicators; more ranks do not make them much larger."""


@dataclass(frozen=True)
class Hardware:
    """`gpus` in all, over `nodes`; memory of one GPU, of one node's host and disk; links in bytes per second."""

    gpus: int = 8
    gpu_bytes: int = 80 * 10**9
    host_bytes: int | None = None
    disk_bytes: int | None = None
    nodes: int = 1
    link_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.nodes < 1:
            raise ConfigError(f"--gpus {self.gpus} on --nodes {self.nodes}: at least one of each is needed")
        if self.gpus % self.nodes:
            raise ConfigError(f"--gpus {self.gpus} cannot be spread evenly over --nodes {self.nodes}")
        if self.gpu_bytes <= self.reserved_bytes:
            raise ConfigError(
                f"--gpu-memory {format_bytes(self.gpu_bytes)}: the driver's context and the communicators alone take "
                f"{format_bytes(self.reserved_bytes)}"
            )

    @property
    def reserved_bytes(self) -> int:
        """What is gone before torch's allocator gets anything."""
        return CONTEXT_BYTES + (COMMUNICATOR_BYTES if self.gpus > 1 else 0)

    def __str__(self) -> str:
        parts = [f"{self.gpus} x {format_bytes(self.gpu_bytes)}"]
        if self.nodes > 1:
            parts.append(f"on {self.nodes} nodes")
        if self.host_bytes is not None:
            parts.append(f"host {format_bytes(self.host_bytes)}")
        if self.disk_bytes is not None:
            parts.append(f"disk {format_bytes(self.disk_bytes)}")
        return ", ".join(parts)


def here() -> Hardware:
    """This machine: its GPUs, the memory of its host, the free disk below the working folder."""
    import shutil

    import torch

    from shardwise import env

    if not torch.cuda.is_available():
        raise ConfigError("--here: torch finds no CUDA device on this machine; say --gpus and --gpu-memory instead")
    smallest = min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    host = env.hardware()["memory_bytes"]
    return Hardware(torch.cuda.device_count(), smallest, host, shutil.disk_usage(".").free)
