"""Memory seen from outside: what the process has now, and what one whole step is made of, moment by moment."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardwise.analyzer import MemoryAnalyzer
from shardwise.engine import Engine


def held(device: torch.device) -> tuple[int, int]:
    """Bytes now and at most: of torch's allocator on a GPU, of the whole process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return _from_resource()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmRSS", "VmHWM"))}
    return sizes["VmRSS"], sizes["VmHWM"]


def _from_resource() -> tuple[int, int]:
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak, peak


@dataclass
class Trace:
    """Bytes by kind at many moments of one step, and at its peak."""

    times_s: list[float] = field(default_factory=list)
    kinds: list[dict[str, int]] = field(default_factory=list)
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    peak_bytes: int = 0
    at_peak: dict[str, int] = field(default_factory=dict)


class Watch:
    """Watches steps of an engine, all ranks alike; the last one becomes the trace.

    The optimizer's state is told apart when the optimizer runs, so a step before the one that counts is watched too.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._analyzer = MemoryAnalyzer(engine)
        self._handles: list[Any] = []
        self._trace: Trace | None = None
        self._started_s = 0.0

    def __enter__(self) -> Watch:
        self._analyzer.start()
        modules = [module for module in self._engine.module.modules() if module is not self._engine.module]
        for module in modules:
            if next(module.parameters(recurse=False), None) is not None:
                self._handles.append(module.register_forward_hook(self._note))
        for param in self._engine.module.parameters():
            self._handles.append(param.register_post_accumulate_grad_hook(self._note))
        return self

    def __exit__(self, *exception: Any) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._analyzer.stop()

    @contextlib.contextmanager
    def step(self) -> Iterator[Trace]:
        """One step; what it yields is complete when it ends."""
        self._trace, self._started_s = Trace(), time.perf_counter()
        first = len(self._analyzer.points)
        self._note()
        yield self._trace
        self._note()
        self._analyzer.record("step")
        self._trace.peak_bytes = max(point.peak_bytes for point in self._analyzer.points[first:])
        self._trace.at_peak = self._analyzer.at_peak()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter() - self._started_s
        self._note()
        yield
        self._note()
        if self._trace is not None:
            self._trace.phases.append((name, start, time.perf_counter() - self._started_s))

    def _note(self, *_: Any) -> None:
        if self._trace is not None:
            self._trace.times_s.append(time.perf_counter() - self._started_s)
            self._trace.kinds.append(self._analyzer.by_kind())
