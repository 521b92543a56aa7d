"""What the offloaded states of one engine share to travel between the device and where they rest."""

from __future__ import annotations

import torch

from shardwise.config.sections import Offload
from shardwise.memory import Ledger
from shardwise.offload.buffer_pool import DeviceBufferPool
from shardwise.offload.pinned import HostMemory
from shardwise.offload.staging import Staging
from shardwise.offload.weight_files import WeightFiles

_LEAST_BYTES, _MOST_BYTES = 4 << 20, 64 << 20
"""The size of a buffer, unless it is configured. On an H200, a pool of 256 MiB buffers was 1 to 2 % faster with 2.7 B
parameters and reserved 1.9 GiB more; one of 32 MiB was 5 % slower (benchmarks/gpu_reserved.py, gpu_offload.py)."""
_ELEMENT_BYTES = 16
"""What an element takes in a buffer, about: master, two moments and a gradient."""
_MOST_BUFFERS = 8
_BUCKETS = 64
"""A rank's states are cut into at least this many buckets: then 16 buffers hold at most a quarter of them.
Otherwise a small model would have all its states on the device, and offload would save nothing
(test_planning_dry_run.test_a_higher_stage_never_holds_more_offloaded_either)."""


class OffloadContext:
    """Streams, device buffers, the disk's staging, and the size of buckets."""

    def __init__(
        self,
        device: torch.device,
        ledger: Ledger,
        settings: Offload,
        numel: int,
        host: HostMemory | None = None,
        staging: Staging | None = None,
    ) -> None:
        """`numel` counts the elements of this rank whose states rest off the device."""
        self.host = host or host_memory(settings, device)
        self.streams = self.host.streams(device)
        self.pool = DeviceBufferPool(ledger, self.streams)
        self.ledger = ledger
        self.staging = staging
        self.weight_files: WeightFiles | None = None
        """The files that weights on the disk rest in, where they are only read."""
        self.bucket_numel = bucket_numel(settings, numel)
        self._most_buffers = settings.buffer_count or _MOST_BUFFERS

    def expect(self, buckets: int) -> None:
        """Size the pool for units of `buckets` buckets: three such units, within the configured bound."""
        self.pool.count = max(self.pool.count, min(self._most_buffers, 3 * buckets))

    def prefetch_limit(self, progress: float) -> int:
        """How many buffers prefetched states may occupy.

        At the beginning of a backward (`progress` 0) all but two, which transfers need; at its end, when activations
        have been freed, twice as many.
        """
        return self.pool.count - 2 + int(progress * self.pool.count)

    def begin_step(self) -> None:
        """A step's updates begin."""
        if self.staging is not None:
            self.staging.begin_step()

    def close(self) -> None:
        """Free the device buffers and remove the files on the disk."""
        self.streams.drain()
        self.pool.trim()
        if self.staging is not None:
            self.staging.close()
        if self.weight_files is not None:
            self.weight_files.close()


def host_memory(settings: Offload, device: torch.device) -> HostMemory:
    """Host memory, page-locked where a GPU copies from it."""
    return HostMemory(pinned=settings.pin_memory and device.type == "cuda")


def bucket_numel(settings: Offload, numel: int) -> int:
    """The most elements of a bucket, of a rank that has `numel` elements off the device."""
    share_bytes = min(_MOST_BYTES, max(_LEAST_BYTES, numel * _ELEMENT_BYTES // _BUCKETS))
    return max(1024, (settings.buffer_bytes or share_bytes) // _ELEMENT_BYTES // 1024 * 1024)
