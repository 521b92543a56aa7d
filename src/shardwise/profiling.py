"""Names for the profiler (each phase of each unit shows up in a trace as `shardwise::gather blocks.3`), and a clock."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch.profiler import record_function

_NOTHING = contextlib.nullcontext()


def mark(verb: str, *units: str) -> contextlib.AbstractContextManager[object]:
    """Mark what happens within it, if a profiler is looking: a mark costs microseconds, several times a unit."""
    if torch._C._autograd._profiler_enabled():
        return record_function(f"shardwise::{verb} {' '.join(units)}")
    return _NOTHING


class Clock:
    """Host seconds by phase; with `device`, each phase waits for it, so that the seconds are the device's too."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._wait()
        start = time.perf_counter()
        try:
            yield
        finally:
            self._wait()
            self.seconds[name] += time.perf_counter() - start

    def _wait(self) -> None:
        if self._device is not None:
            torch.cuda.synchronize(self._device)
