"""The machine to train on: GPUs, memory, links, and what is reserved on a GPU besides tensors."""

from __future__ import annotations

import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context

import torch

from shardwise.config.shape import NodeShape
from shardwise.errors import ConfigError
from shardwise.machine import env
from shardwise.memory.ledger import PAGE_BYTES
from shardwise.sizes import format_bytes

CONTEXT_BYTES = 800 * 10**6
"""What the CUDA driver and torch's kernels use on a GPU besides tensors: 0.54 GB when a process starts on an H200 with
torch 2.11, 0.77 to 0.80 GB once the kernels of a training step are loaded."""
PAGES_BYTES = 10 * PAGE_BYTES
"""torch's allocator maps whole pages: what is unused between tensors at a peak."""
COMMUNICATOR_BYTES = 150 * 10**6
"""NCCL's buffers: a few MB per channel and peer, for two communicators. More ranks hardly make them larger."""


@dataclass(frozen=True)
class Rates:
    """Rates of a machine per second; None if a rate is neither given nor measured.

    operations  floating-point operations of a GPU that training reaches, not those of a data sheet
    gpu_link    bytes from a GPU to the others of its node
    node_link   bytes from a node to the others
    host_link   bytes between a GPU and its host, each way
    disk        bytes between a node and its disk
    """

    operations: float | None = None
    gpu_link: float | None = None
    node_link: float | None = None
    host_link: float | None = None
    disk: float | None = None

    def __post_init__(self) -> None:
        for name, rate in asdict(self).items():
            if rate is not None and not rate > 0:
                raise ConfigError(f"the rate {name} is {rate}: more than 0 is needed")

    def or_typical(self) -> dict[str, float]:
        """These rates, and typical ones for links and disks that are not known: good enough to rank configurations."""
        return TYPICAL | {name: rate for name, rate in asdict(self).items() if rate is not None}


TYPICAL = {"gpu_link": 100e9, "node_link": 50e9, "host_link": 25e9, "disk": 3e9}
"""The links and the disk of a node of current GPUs."""


@dataclass(frozen=True)
class Hardware:
    """`gpus` in all, spread over `nodes`; the memory of one GPU, and of the host and the disk of one node; rates."""

    gpus: int = 8
    gpu_bytes: int = 80 * 10**9
    host_bytes: int | None = None
    disk_bytes: int | None = None
    nodes: int = 1
    rates: Rates = Rates()

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.nodes < 1:
            raise ConfigError(f"--gpus {self.gpus} on --nodes {self.nodes}: at least one of each is needed")
        if self.gpus % self.nodes:
            raise ConfigError(f"--gpus {self.gpus} cannot be spread evenly over --nodes {self.nodes}")
        if self.gpu_bytes <= self.reserved_bytes:
            raise ConfigError(
                f"--gpu-memory {format_bytes(self.gpu_bytes)}: the driver's context, communicators and pages use "
                f"{format_bytes(self.reserved_bytes)} of a GPU; give the memory of one GPU, such as 24GB"
            )

    @property
    def shape(self) -> NodeShape:
        """The GPUs of each node."""
        return NodeShape(self.nodes, self.gpus // self.nodes)

    def zero_shape(self, tp: int = 1, pp: int = 1) -> NodeShape:
        """The nodes of ZeRO's ranks. Each `tp` neighbouring GPUs hold one part of the model together; the `pp` ranks of
        a pipeline are the farthest apart, so that those of one stage share nodes where they can."""
        if tp < 1 or self.gpus % tp:
            raise ConfigError(f"--tp {tp} does not divide {self.gpus} GPUs: take one that does")
        if pp < 1 or self.gpus // tp % pp:
            raise ConfigError(f"--pp {pp} does not divide {self.gpus // tp} GPUs: take one that does")
        copies = self.gpus // tp // pp
        per_node = min(copies, max(1, self.shape.per_node // tp))
        return NodeShape(copies // per_node, per_node)

    @property
    def context_bytes(self) -> int:
        """Bytes of a GPU that the driver and the communicators take."""
        pairs = 0 if self.gpus == 1 else 1 if self.shape.is_flat else 3  # of all ranks, in the node, across nodes
        return CONTEXT_BYTES + pairs * COMMUNICATOR_BYTES

    @property
    def reserved_bytes(self) -> int:
        """Bytes of a GPU that tensors cannot use."""
        return self.context_bytes + PAGES_BYTES

    @property
    def tier_bytes(self) -> dict[str, int]:
        """Bytes of a node's host and disk, as far as they are known."""
        sizes = {"host": self.host_bytes, "disk": self.disk_bytes}
        return {tier: size for tier, size in sizes.items() if size is not None}

    def __str__(self) -> str:
        parts = [f"{self.gpus} x {format_bytes(self.gpu_bytes)}"]
        if self.nodes > 1:
            parts.append(f"on {self.nodes} nodes")
        return ", ".join(parts + [f"{tier} {format_bytes(size)}" for tier, size in self.tier_bytes.items()])


def here() -> Hardware:
    """This machine: its GPUs, its host memory, the free disk space of the working folder, and measured links.

    Measured in a child process unless this one uses CUDA already: a process that does cannot fork any more, and dry
    runs are forked.
    """
    if torch.cuda.is_initialized():
        return _measured()
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        return pool.submit(_measured).result()


def _measured() -> Hardware:
    if not torch.cuda.is_available():
        raise ConfigError("--here: torch finds no CUDA device on this machine; give --gpus and --gpu-memory instead")
    smallest = min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    host = env.hardware()["memory_bytes"]
    links = env.device_links_gbs().values()
    up_and_down = env.host_device_gbs()["both at once"] / 2
    rates = Rates(gpu_link=min(links) * 1e9 if links else None, host_link=up_and_down * 1e9)
    return Hardware(torch.cuda.device_count(), smallest, host, shutil.disk_usage(".").free, rates=rates)
