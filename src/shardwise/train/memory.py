"""Memory measured from outside: of the process, and of one whole step by kind and time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.engine.engine import Engine
from shardwise.machine.memory import process_memory
from shardwise.observe.analyzer import MemoryAnalyzer


def memory_in_use(device: torch.device) -> tuple[int, int]:
    """Bytes now and at the peak: of torch's allocator on a GPU, of the whole process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    return process_memory()


@dataclass
class MemoryTrace:
    """One step in short intervals: when each ended, and the bytes by kind at its peak."""

    times_s: list[float] = field(default_factory=list)
    kinds: list[dict[str, int]] = field(default_factory=list)
    phases: list[tuple[str, float, float]] = field(default_factory=list)

    @property
    def peak_bytes(self) -> int:
        return sum(self.at_peak.values())

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes by kind at the peak of the step."""
        return max(self.kinds, key=lambda kinds: sum(kinds.values()))


class StepWatch:
    """Measures the memory of steps of an engine, on every rank.

    The optimizer's state gets its label when the optimizer runs, so watch one step before the step that counts.
    """

    def __init__(self, engine: Engine) -> None:
        self._model = engine.module
        self._analyzer = MemoryAnalyzer(engine)
        self._handles: list[Any] = []
        self._trace: MemoryTrace | None = None
        self._started_s = 0.0

    def __enter__(self) -> StepWatch:
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
    def step(self) -> Iterator[MemoryTrace]:
        """Watch one step. The trace is complete when the context ends."""
        self._analyzer.record("before the step")
        trace = self._trace = MemoryTrace()
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
