"""The picture of a `MemoryAnalyzer`: allocated bytes over time, the peaks between points, phases as bands."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.plotting import check_path, pyplot

if TYPE_CHECKING:
    from shardwise.observe.analyzer import MemoryAnalyzer

BANDS = ("#dbe6f4", "#f7e6d3", "#dcecdd", "#f0dfe9")
MOST_NAMES = 40
"""Beyond so many points their names would cover each other."""


def draw(analyzers: Sequence[MemoryAnalyzer], path: str | Path) -> None:
    """One row per analyzer, with a common scale of bytes."""
    check_path(path)
    plt = pyplot()
    figure, axes = plt.subplots(
        len(analyzers), 1, figsize=(11, 0.8 + 3.2 * len(analyzers)), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, analyzer in zip(axes[:, 0], analyzers, strict=True):
        _one(axis, analyzer)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _one(axis: Any, analyzer: MemoryAnalyzer) -> None:
    colors: dict[str, str] = {}
    for name, start, end in analyzer.phases:
        is_new = name not in colors
        color = colors.setdefault(name, BANDS[len(colors) % len(BANDS)])
        axis.axvspan(start, end, color=color, label=name if is_new else None)
    times = [point.time_s for point in analyzer.points]
    axis.plot(times, [point.allocated_bytes / 1e6 for point in analyzer.points], color="#2f4b6e", marker="o", ms=3)
    middles = [(first + second) / 2 for first, second in pairwise(times)]
    peaks = [point.peak_bytes / 1e6 for point in analyzer.points[1:]]
    axis.plot(middles, peaks, color="#c03030", marker="^", ms=4, linestyle="none", label="peak between points")
    if len(analyzer.points) <= MOST_NAMES:
        inside = {name for name, _, _ in analyzer.phases} | {f"before {name}" for name, _, _ in analyzer.phases}
        for point in analyzer.points:
            if point.name not in inside:
                axis.annotate(point.name, (point.time_s, point.allocated_bytes / 1e6), rotation=30, fontsize=7)
    axis.set_title(f"{analyzer.name}: allocated, MB (peak {analyzer.peak_bytes / 1e6:.4g})", loc="left", fontsize=10)
    axis.set_xlabel("seconds", fontsize=8)
    axis.set_ylim(bottom=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
