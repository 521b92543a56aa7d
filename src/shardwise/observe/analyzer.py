"""`MemoryAnalyzer`: the memory of a program at chosen points, its peak, and the parts of the peak.

    with MemoryAnalyzer(model, optimizer) as analyzer:
        with analyzer.phase("forward"):
            loss = model(x)
        with analyzer.phase("backward"):
            loss.backward()
        optimizer.step()
        analyzer.record("after step")
    print(analyzer)
    analyzer.plot("timeline.png")

On CUDA the totals are the allocator's. On the CPU they are those of live tensor storage, from a `StorageObserver`, and
`reserved` is the memory of the process. Kinds follow the rules of `labels`.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.engine.engine import Engine
from shardwise.machine.memory import process_memory
from shardwise.observe.labels import KINDS, Labelling, by_kind
from shardwise.observe.storage import StorageObserver
from shardwise.plotting import DARK, RED, check_path, figure

BANDS = ("#dbe6f4", "#f7e6d3", "#dcecdd", "#f0dfe9")
MOST_NAMES = 40
"""With more points than this, their names would overlap."""


@dataclass(frozen=True)
class MemoryPoint:
    """The memory at one moment. `peak_bytes`, `peak_kinds` (its parts) and `delta_bytes` refer to the time since the
    previous point."""

    name: str
    time_s: float
    allocated_bytes: int
    reserved_bytes: int
    delta_bytes: int
    peak_bytes: int
    peak_kinds: dict[str, int] = field(default_factory=dict)


class PeakStorage(NamedTuple):
    """Storage that was alive at the peak."""

    kind: str
    name: str
    size_bytes: int


class MemoryAnalyzer:
    """Records memory at points and over phases. Use as a context manager, or `start` and `stop` it.

    `model` is a module or a shardwise engine, whose own optimizer is then used. Without a model the totals are the
    same, but they are not split by kind. `watch` names the model later.

    >>> with MemoryAnalyzer() as analyzer:
    ...     x = torch.ones(1000)
    ...     _ = analyzer.record("after x")
    >>> analyzer.points[-1].delta_bytes
    4000
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        device: str | torch.device | None = None,
        name: str = "run",
    ) -> None:
        self.name = name
        self.points: list[MemoryPoint] = []
        self.phases: list[tuple[str, float, float]] = []
        self._labelling = Labelling()
        self._device = torch.device(device) if device is not None else _device_of(model)
        self._observer = StorageObserver(self._device, label=self._labelling.label_new)
        self._model = model
        self._optimizer = optimizer
        self.peak_bytes = 0
        """The most that was allocated at once."""
        self._at_peak: dict[str, int] = {}
        self._started_s: float | None = None

    def __enter__(self) -> MemoryAnalyzer:
        return self.start()

    def __exit__(self, *exception: Any) -> None:
        self.stop()

    def start(self) -> MemoryAnalyzer:
        """Begin to watch. The first point is the memory in use now."""
        gc.collect()  # tensors that an earlier run left in reference cycles do not count
        self._observer.__enter__()
        self._started_s = time.perf_counter()
        if self._model is not None:
            self.watch(self._model, self._optimizer)
        self.record("start")
        return self

    def stop(self) -> None:
        """Stop watching and drop the references to the model. The recorded points stay."""
        if self._observer.peak_bytes != self.points[-1].allocated_bytes:
            self.record("end")
        self._labelling.detach()
        self._observer.__exit__(None, None, None)
        self._model = self._optimizer = self._started_s = None

    def watch(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Label the tensors of `model` and `optimizer` by kind from now on."""
        if isinstance(model, Engine):
            self._labelling.attach_engine(self._observer, model)
            model = model.module
        else:
            self._labelling.attach(self._observer, model, optimizer)
        for name, param in model.named_parameters():
            self._labelling.label("weights", name, param)

    def record(self, name: str) -> MemoryPoint:
        """Record the memory at this moment."""
        if self._started_s is None:
            raise RuntimeError("the analyzer is not watching: use it as a context manager, or call start() first")
        allocated, peak = self._observer.current_bytes, self._observer.peak_bytes
        split = self._observer.breakdown_at_peak
        if peak >= self.peak_bytes:
            self.peak_bytes, self._at_peak = peak, split
        is_cuda = self._device.type == "cuda"
        reserved = torch.cuda.memory_reserved(self._device) if is_cuda else process_memory().now_bytes
        change = allocated - self.points[-1].allocated_bytes if self.points else 0
        self.points.append(MemoryPoint(name, self._now(), allocated, reserved, change, peak, by_kind(split)))
        self._observer.reset_peak()
        return self.points[-1]

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the memory at the end of a phase, and the peak within it."""
        if not self.points or self._observer.peak_bytes != self.points[-1].allocated_bytes:
            self.record(f"before {name}")  # else the peak of the phase would include it
        start = self._now()
        try:
            yield
        finally:
            self.record(name)
            self.phases.append((name, start, self._now()))

    def at_peak(self) -> dict[str, int]:
        """Bytes by kind at the peak."""
        return by_kind(self._at_peak)

    def largest(self, count: int = 10) -> list[PeakStorage]:
        """The largest storages alive at the peak. Storages of the same kind and name count as one."""
        alive = [PeakStorage(*label.partition("|")[::2], size) for label, size in self._at_peak.items()]
        return sorted(alive, key=lambda each: -each.size_bytes)[:count]

    def __str__(self) -> str:
        lines = [f"{self.name}: MB on {self._device}", _line("", "allocated", "reserved", "change", "peak")]
        for point in self.points:
            sizes = point.allocated_bytes, point.reserved_bytes, point.delta_bytes, point.peak_bytes
            lines.append(_line(point.name, *map(_mb, sizes)))
        lines.append(f"at the peak of {_mb(self.peak_bytes)} MB")
        lines += [f"  {kind:<14}{_mb(size):>10}" for kind, size in self.at_peak().items() if size]
        lines.append("largest then")
        lines += [f"  {_mb(each.size_bytes):>10}  {each.kind}: {each.name}" for each in self.largest(5)]
        return "\n".join(lines)

    def plot(self, path: str | Path) -> None:
        """Draw the timeline: allocated bytes, peaks between points, phases as bands. Needs matplotlib."""
        draw_timelines([self], path)

    @staticmethod
    def compare(first: MemoryAnalyzer, *others: MemoryAnalyzer) -> str:
        """A table of peaks by kind, with what each run saves compared with the first."""
        lines = [f"{'MB':<16}{'peak':>10}{'saved':>8}" + "".join(f"{kind:>13}" for kind in KINDS)]
        for each in (first, *others):
            saved = "" if each is first else f"{1 - each.peak_bytes / max(1, first.peak_bytes):.0%}"
            split = "".join(f"{_mb(each.at_peak()[kind]):>13}" for kind in KINDS)
            lines.append(f"{each.name:<16}{_mb(each.peak_bytes):>10}{saved:>8}{split}")
        return "\n".join(lines)

    def _now(self) -> float:
        return time.perf_counter() - (self._started_s or 0.0)


def draw_timelines(analyzers: Sequence[MemoryAnalyzer], path: str | Path) -> None:
    """Draw several analyzers below each other, with a common scale of bytes."""
    check_path(path)
    with figure(path, len(analyzers), 1, (11, 0.8 + 3.2 * len(analyzers)), sharey=True) as (_, axes):
        for axis, analyzer in zip(axes[:, 0], analyzers, strict=True):
            _draw_timeline(axis, analyzer)


def _draw_timeline(axis: Any, analyzer: MemoryAnalyzer) -> None:
    colors: dict[str, str] = {}
    for name, start, end in analyzer.phases:
        is_new = name not in colors
        color = colors.setdefault(name, BANDS[len(colors) % len(BANDS)])
        axis.axvspan(start, end, color=color, label=name if is_new else None)
    times = [point.time_s for point in analyzer.points]
    axis.plot(times, [point.allocated_bytes / 1e6 for point in analyzer.points], color=DARK, marker="o", ms=3)
    middles = [(first + second) / 2 for first, second in pairwise(times)]
    peaks = [point.peak_bytes / 1e6 for point in analyzer.points[1:]]
    axis.plot(middles, peaks, color=RED, marker="^", ms=4, linestyle="none", label="peak between points")
    if len(analyzer.points) <= MOST_NAMES:
        inside = {name for name, _, _ in analyzer.phases} | {f"before {name}" for name, _, _ in analyzer.phases}
        for point in analyzer.points:
            if point.name not in inside:
                axis.annotate(point.name, (point.time_s, point.allocated_bytes / 1e6), rotation=30, fontsize=7)
    axis.set_title(f"{analyzer.name}: allocated, MB (peak {analyzer.peak_bytes / 1e6:.4g})", loc="left", fontsize=10)
    axis.set_xlabel("seconds", fontsize=8)
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


def _device_of(model: nn.Module | None) -> torch.device:
    if model is not None:
        return next((param.device for param in model.parameters()), torch.device("cpu"))
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _line(name: str, *cells: str) -> str:
    return f"{name:<28}" + "".join(f"{cell:>12}" for cell in cells)


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.{1 if abs(size_bytes) >= 1e7 else 3}f}" if size_bytes else "0"
