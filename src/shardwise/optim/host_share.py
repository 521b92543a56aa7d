"""The share of an update that the host makes while the device makes the rest, so that both end at the same time.

It is measured at the start with both busy, because they share the bandwidth of the host's memory.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import torch

from shardwise.comm import Comm
from shardwise.offload.pinned import page_locked
from shardwise.offload.streams import Streams, now

_NUMEL = 1 << 24
_MEASURED_S = 0.25
_STREAMED_BYTES = 14
"""What an element sends each way when it is updated on the device: master, two moments, and its gradient once."""


def host_share(comm: Comm) -> float:
    """The host's share, the same on all ranks. On the CPU, host and device are one: a half each."""
    if comm.device.type != "cuda":
        return 0.5
    shares: list[float] = comm.share_object(_measured(comm.device), "the host's share of updates")
    return round(sum(shares) / len(shares), 2)


def balanced(host_rate: float, device_rate: float) -> float:
    """The share of a host that updates `host_rate` elements in a second.

    >>> balanced(1e9, 3e9)
    0.25
    """
    return host_rate / (host_rate + device_rate)


def use_cores() -> None:
    """Limit torch to this rank's share of the cores, less one for the thread that issues work."""
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, cores - 1))


def _measured(device: torch.device) -> float:
    copy, update = _copies(device), _host_update()
    copy()
    rates: list[float] = []

    def measure() -> None:
        use_cores()
        rates.append(_rate(update))

    thread = threading.Thread(target=measure)
    thread.start()
    device_rate = _rate(copy)
    thread.join()
    return balanced(rates[0], device_rate)


def _rate(work: Callable[[], None]) -> float:
    """Elements in a second, without the first turn, which starts threads."""
    work()
    started, turns = time.perf_counter(), 0
    while (passed_s := time.perf_counter() - started) < _MEASURED_S:
        work()
        turns += 1
    return turns * _NUMEL / passed_s


def _copies(device: torch.device) -> Callable[[], None]:
    streams = Streams(device)
    numel = _NUMEL * _STREAMED_BYTES // 4
    here, there = torch.empty(numel, device=device), torch.empty(numel, device=device)
    source, target = page_locked(numel, torch.float32), page_locked(numel, torch.float32)
    streams.h2d.wait(now(device))
    streams.d2h.wait(now(device))

    def copy() -> None:
        with streams.h2d:
            here.copy_(source, non_blocking=True)
        with streams.d2h:
            target.copy_(there, non_blocking=True)
        streams.h2d.mark().synchronize()
        streams.d2h.mark().synchronize()

    return copy


def _host_update() -> Callable[[], None]:
    piece = torch.nn.Parameter(torch.zeros(_NUMEL))
    grads, weights = (torch.zeros(_NUMEL, dtype=torch.bfloat16) for _ in range(2))
    optimizer = torch.optim.AdamW([piece], fused=True)
    piece.grad = torch.zeros(_NUMEL)

    def update() -> None:
        with torch.no_grad():
            assert piece.grad is not None
            piece.grad.copy_(grads)
            optimizer.step()
            weights.copy_(piece)

    return update
