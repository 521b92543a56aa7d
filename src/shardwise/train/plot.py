"""A run as one figure: the loss over the steps, and the memory of a rank during one step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.plotting import DARK, KIND_COLORS, RED, figure
from shardwise.train.folder import StepMetrics
from shardwise.train.step_watch import MemoryTrace

NARROW = 0.1
"""Phases shorter than this part of the step are not named in the figure."""


def draw(rows: Sequence[StepMetrics], trace: MemoryTrace | None, title: str, path: Path) -> None:
    """Write the figure to `path`. Raises a ConfigError if matplotlib is missing."""
    with figure(path, 1, 2, (12, 4.2)) as (made, ((left, right),)):
        _loss(left, rows)
        if trace is not None and len(trace.times_s) > 2:
            _step(right, trace)
        else:
            _memory(right, rows)
        for axis in (left, right):
            axis.grid(axis="y", color="#dddddd", linewidth=0.6)
        made.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)


def _loss(axis: Any, rows: Sequence[StepMetrics]) -> None:
    steps, losses = [row.step for row in rows], [row.loss for row in rows]
    axis.plot(steps, losses, color=DARK, alpha=0.25, linewidth=0.8)
    axis.plot(steps, smoothed(losses), color=DARK, linewidth=1.6, label="training")
    validated = [(row.step, row.val_loss) for row in rows if row.val_loss is not None]
    if validated:
        axis.plot(*zip(*validated, strict=True), color=RED, marker="o", ms=5, label="validation")
        last = validated[-1]
        axis.annotate(f"{last[1]:.2f}", last, (0, -15), textcoords="offset points", color=RED, ha="center")
    axis.set_title("loss (nats per token)", loc="left", fontsize=10)
    axis.set_xlabel("step", fontsize=9)
    axis.legend(fontsize=9, frameon=False)


def smoothed(values: Sequence[float]) -> list[float]:
    """A centred moving average over a fortieth of the values, over fewer of them towards the ends.

    >>> smoothed([4.0, 2.0])
    [4.0, 2.0]
    """
    result = []
    for index in range(len(values)):
        reach = min(len(values) // 80, index, len(values) - 1 - index)
        around = values[index - reach : index + reach + 1]
        result.append(sum(around) / len(around))
    return result


def _step(axis: Any, trace: MemoryTrace) -> None:
    kinds = [kind for kind in KIND_COLORS if any(moment.get(kind) for moment in trace.kinds)]
    times_ms = [0.0, *(1e3 * moment for moment in trace.times_s)]
    heights = [[moment.get(kind, 0) / 1e6 for moment in (trace.kinds[0], *trace.kinds)] for kind in kinds]
    axis.stackplot(
        times_ms, heights, colors=[KIND_COLORS[kind] for kind in kinds], labels=kinds, linewidth=0, step="pre"
    )
    peak_mb = trace.peak_bytes / 1e6
    axis.axhline(peak_mb, color=RED, linewidth=1, linestyle="--")
    axis.text(times_ms[-1], peak_mb, f"peak {peak_mb:.3g}", color=RED, ha="right", va="bottom", fontsize=9)
    for name, start, end in trace.phases if len(trace.phases) <= 3 else ():
        axis.axvline(1e3 * start, color="black", linewidth=0.6, linestyle=":")
        if end - start > NARROW * trace.times_s[-1]:
            axis.text(5e2 * (start + end), 1.12 * peak_mb, name, ha="center", fontsize=9)
    axis.set_ylim(0, 1.2 * peak_mb)
    axis.set_xlim(times_ms[0], times_ms[-1])
    axis.set_title("memory of rank 0 in the last step, MB of tensors", loc="left", fontsize=10)
    axis.set_xlabel("milliseconds (measuring slows the step down)", fontsize=9)
    handles, labels = axis.get_legend_handles_labels()
    axis.legend(handles[::-1], labels[::-1], fontsize=9, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


def _memory(axis: Any, rows: Sequence[StepMetrics]) -> None:
    steps = [row.step for row in rows]
    axis.plot(steps, [row.peak_bytes / 1e6 for row in rows], color=RED, linestyle="--", label="peak")
    axis.plot(steps, [row.memory_bytes / 1e6 for row in rows], color=DARK, label="now")
    axis.set_ylim(bottom=0)
    axis.set_title("memory of the rank that uses most (MB)", loc="left", fontsize=10)
    axis.set_xlabel("step", fontsize=9)
    axis.legend(fontsize=9, frameon=False, loc="lower right")
