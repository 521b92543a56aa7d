"""`MemoryAnalyzer`: where a program's memory goes, point by point, and what its peak was made of.

    with MemoryAnalyzer(model, optimizer) as analyzer:
        with analyzer.phase("forward"):
            loss = model(x)
        with analyzer.phase("backward"):
            loss.backward()
        optimizer.step()
        analyzer.record("after step")
    print(analyzer)
    analyzer.plot("timeline.png")

On CUDA the totals are the allocator's; on the CPU those of live tensor storage, seen by `StorageObserver`, and
`reserved` is the memory of the process. Kinds are found by the rules of `labelling`.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.observe import StorageObserver
from shardwise.observe.labels import KINDS, Labelling, by_kind


@dataclass(frozen=True)
class Point:
    """The memory at one moment. `peak_bytes` is the most since the point before, `peak_kinds` what that was made of,
    and `delta_bytes` the change since."""

    name: str
    time_s: float
    allocated_bytes: int
    reserved_bytes: int
    delta_bytes: int
    peak_bytes: int
    peak_kinds: dict[str, int] = field(default_factory=dict)


class Held(NamedTuple):
    """A tensor's storage that was alive at the peak."""

    kind: str
    name: str
    size_bytes: int


class MemoryAnalyzer:
    """Records memory at points and over phases. Use as a context manager, or `start` and `stop` it.

    `model` is a module or a shardwise engine (then `optimizer` is its own); without them, totals are exact all the
    same, and nothing can be told apart. `watch` names them later.

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
        self.points: list[Point] = []
        self.phases: list[tuple[str, float, float]] = []
        self._labelling = Labelling()
        self._device = torch.device(device) if device is not None else _device_of(model)
        self._observer = StorageObserver(self._device, label=self._labelling.first_sight)
        self._model = model
        self._optimizer = optimizer
        self._peak_bytes = 0
        self._at_peak: dict[str, int] = {}
        self._started_s: float | None = None

    def __enter__(self) -> MemoryAnalyzer:
        return self.start()

    def __exit__(self, *exception: Any) -> None:
        self.stop()

    def start(self) -> MemoryAnalyzer:
        """Begin to watch; the first point is what is there now."""
        gc.collect()  # what an earlier run left in cycles is not this one's
        self._observer.__enter__()
        self._started_s = time.perf_counter()
        if self._model is not None:
            self.watch(self._model, self._optimizer)
        self._add("start")
        return self

    def stop(self) -> None:
        """End watching; what was recorded stays, and the model is let go."""
        if self._observer.peak_bytes != self.points[-1].allocated_bytes:
            self._add("end")
        self._labelling.detach()
        self._observer.__exit__(None, None, None)
        self._model = self._optimizer = self._started_s = None

    def watch(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Tell the kinds of `model` and `optimizer` apart from now on."""
        engine = _as_engine(model)
        if engine is not None:
            model, optimizer = engine.module, engine.optimizer
            engine.register_grad_hook(lambda name, shard: self._labelling.label(self._observer, "grads", name, shard))
        is_master = engine is not None and engine.config.precision.weights_dtype != "fp32"
        self._labelling.attach(self._observer, model, optimizer, master=is_master)
        for name, param in model.named_parameters():
            self._labelling.label(self._observer, "weights", name, param)

    def record(self, name: str) -> Point:
        """Note the memory at this moment."""
        if self._started_s is None:
            raise RuntimeError("the analyzer is not watching: use it as a context manager, or call start() first")
        return self._add(name)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note the memory at the end of a phase, and its peak within."""
        if not self.points or self._observer.peak_bytes != self.points[-1].allocated_bytes:
            self.record(f"before {name}")  # so that the peak of the phase is its own
        start = self._now()
        try:
            yield
        finally:
            self.record(name)
            self.phases.append((name, start, self._now()))

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated at once."""
        return self._peak_bytes

    def at_peak(self) -> dict[str, int]:
        """Bytes by kind at the peak."""
        return by_kind(self._at_peak)

    def largest(self, count: int = 10) -> list[Held]:
        """The largest storages alive at the peak; equal ones of the same kind and name are taken together."""
        held = [Held(*text.partition("|")[::2], size) for text, size in self._at_peak.items()]
        return sorted(held, key=lambda each: -each.size_bytes)[:count]

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
        from shardwise.observe.timeline import draw

        draw([self], path)

    @staticmethod
    def compare(first: MemoryAnalyzer, *others: MemoryAnalyzer) -> str:
        """Peaks side by side, by kind, with what each saves against the first."""
        lines = [f"{'MB':<16}{'peak':>10}{'saved':>8}" + "".join(f"{kind:>13}" for kind in KINDS)]
        for each in (first, *others):
            saved = "" if each is first else f"{1 - each.peak_bytes / max(1, first.peak_bytes):.0%}"
            split = "".join(f"{_mb(each.at_peak()[kind]):>13}" for kind in KINDS)
            lines.append(f"{each.name:<16}{_mb(each.peak_bytes):>10}{saved:>8}{split}")
        return "\n".join(lines)

    def _add(self, name: str) -> Point:
        allocated, peak = self._observer.current_bytes, self._observer.peak_bytes
        split = self._observer.breakdown_at_peak
        if peak >= self._peak_bytes:
            self._peak_bytes, self._at_peak = peak, split
        before = self.points[-1].allocated_bytes if self.points else allocated
        point = Point(name, self._now(), allocated, self._reserved_bytes(), allocated - before, peak, by_kind(split))
        self.points.append(point)
        self._observer.reset_peak()
        return point

    def _now(self) -> float:
        return time.perf_counter() - (self._started_s or 0.0)

    def _reserved_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.memory_reserved(self._device)
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
        except OSError:
            return 0
        return pages * _page_bytes()


def _device_of(model: nn.Module | None) -> torch.device:
    if model is not None:
        return next((param.device for param in model.parameters()), torch.device("cpu"))
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _as_engine(model: nn.Module) -> Any:
    from shardwise.engine.engine import Engine

    return model if isinstance(model, Engine) else None


def _page_bytes() -> int:
    import resource

    return resource.getpagesize()


def _line(name: str, *cells: str) -> str:
    return f"{name:<28}" + "".join(f"{cell:>12}" for cell in cells)


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.{1 if abs(size_bytes) >= 1e7 else 3}f}" if size_bytes else "0"
