"""Memory seen from outside: what the process has now, and what one whole step is made of, moment by moment."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardwise.engine.engine import Engine
from shardwise.observe.analyzer import MemoryAnalyzer


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
    """One step in short intervals: when each ended, and the bytes by kind at its highest moment."""

    times_s: list[float] = field(default_factory=list)
    kinds: list[dict[str, int]] = field(default_factory=list)
    phases: list[tuple[str, float, float]] = field(default_factory=list)

    @property
    def peak_bytes(self) -> int:
        return sum(self.at_peak.values())

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes by kind at the highest moment of all."""
        return max(self.kinds, key=lambda kinds: sum(kinds.values()))


class Watch:
    """Watches steps of an engine, all ranks alike.

    The optimizer's state is told apart when the optimizer runs, so a step before the one that counts is watched too.
    """

    def __init__(self, engine: Engine) -> None:
        self._model = engine.module
        self._analyzer = MemoryAnalyzer(engine)
        self._handles: list[Any] = []
        self._trace: Trace | None = None
        self._started_s = 0.0

    def __enter__(self) -> Watch:
        self._analyzer.start()
        for module in self._model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                self._handles.append(module.register_forward_hook(self._note))
        for param in self._model.parameters():
            self._handles.append(param.register_post_accumulate_grad_hook(self._note))
        return self

    def __exit__(self, *exception: Any) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._analyzer.stop()

    @contextlib.contextmanager
    def step(self) -> Iterator[Trace]:
        """One step; what it yields is complete when it ends."""
        self._analyzer.record("before the step")
        trace = self._trace = Trace()
        self._started_s = time.perf_counter()
        yield trace
        self._note()
        self._trace = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._note()
        start = time.perf_counter() - self._started_s
        yield
        self._note()
        if self._trace is not None:
            self._trace.phases.append((name, start, time.perf_counter() - self._started_s))

    def _note(self, *_: Any) -> None:
        if self._trace is not None:
            self._trace.times_s.append(time.perf_counter() - self._started_s)
            self._trace.kinds.append(self._analyzer.record("").peak_kinds)
