"""The memory of a rank through one step, measured outside the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwise.engine.engine import Engine
from shardwise.observe.analyzer import MemoryAnalyzer, MemoryPoint


@dataclass
class MemoryTrace:
    """One step in short intervals: when each ended, and the bytes by kind at its peak."""

    times_s: list[float]
    kinds: list[dict[str, int]]
    phases: list[tuple[str, float, float]]

    @property
    def peak_bytes(self) -> int:
        return sum(self.at_peak.values())

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes by kind at the peak of the step."""
        return max(self.kinds, key=lambda kinds: sum(kinds.values()))


class StepWatch(MemoryAnalyzer):
    """Measures the memory of steps of an engine, on every rank: a point after each module and each gradient.

    The optimizer's state gets its label when the optimizer runs, so watch one step before the step that counts.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._hooked = engine.module
        self._handles: list[Any] = []

    def start(self) -> StepWatch:
        super().start()
        for module in self._hooked.modules():
            if next(module.parameters(recurse=False), None) is not None:
                self._handles.append(module.register_forward_hook(self._on_hook))
        for param in self._hooked.parameters():
            self._handles.append(param.register_post_accumulate_grad_hook(self._on_hook))
        return self

    def stop(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        super().stop()

    def begin_step(self) -> None:
        """Drop the points of earlier steps."""
        self.points.clear()
        self.phases.clear()
        self.record("before the step")

    def end_step(self) -> MemoryTrace:
        """The trace since `begin_step`."""
        self.record("end of the step")
        first, *points = self.points
        times_s = [point.time_s - first.time_s for point in points]
        phases = [(name, start - first.time_s, end - first.time_s) for name, start, end in self.phases]
        return MemoryTrace(times_s, [complete_kinds(point) for point in points], phases)

    def _on_hook(self, *_: Any) -> None:
        self.record("")


def complete_kinds(point: MemoryPoint) -> dict[str, int]:
    """The bytes by kind at a point's peak, with all that no tensor holds as "other".

    On CUDA that is what the allocator rounds up and what libraries keep (cuBLAS workspaces). A dry run counts both.
    """
    rest = point.peak_bytes - sum(point.peak_kinds.values())
    return point.peak_kinds | {"other": point.peak_kinds.get("other", 0) + max(0, rest)}
