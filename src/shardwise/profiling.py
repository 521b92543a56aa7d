"""Names for the profiler (each phase of each unit shows up in a trace as `shardwise::gather blocks.3`), and a clock."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable

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
        self._device = device
        waits = device is not None and device.type == "cuda"
        self.now_s: Callable[[], float] = self._device_s if waits else time.perf_counter
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def phase(self, name: str) -> _Phase:
        """Add the seconds that pass within it to those of a phase."""
        return _Phase(self, name)

    def _device_s(self) -> float:
        torch.cuda.synchronize(self._device)
        return time.perf_counter()


class _Phase:
    """Not a generator function, which takes three times as long: a step enters several phases for each unit."""

    __slots__ = ("_clock", "_name", "_start_s")

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock = clock
        self._name = name

    def __enter__(self) -> None:
        self._start_s = self._clock.now_s()

    def __exit__(self, *error: object) -> None:
        self._clock.seconds[self._name] += self._clock.now_s() - self._start_s
