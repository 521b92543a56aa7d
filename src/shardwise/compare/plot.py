"""A comparison as one figure: memory by kind, time of a step, bytes sent. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from shardwise.compare.result import Comparison, Run
from shardwise.compare.table import SPLIT, title
from shardwise.errors import ConfigError
from shardwise.plotting import DARK, KIND_COLORS, RED, figure

COLORED_AS = {"optim": "moments", "in_flight": "in flight"}
COLORS = {kind: KIND_COLORS[COLORED_AS.get(kind, kind)] for kind in SPLIT}
WIRE_COLORS = {"gather": COLORS["weights"], "reduce": COLORS["grads"], "other": COLORS["in_flight"]}
THEIRS = "#a8b3c2"


def plot(comparison: Comparison, path: str | Path) -> None:
    """Draw the measured rows into the file `path`."""
    runs = [run for run in comparison.runs if run.peak is not None]
    if not runs:
        raise ConfigError("nothing to draw: every row failed")
    with figure(path, 1, 3, (13, 1.8 + 0.38 * len(runs)), sharey=True) as (made, ((memory, time, wire),)):
        _memory(memory, runs)
        _time(time, runs, comparison)
        _wire(wire, runs)
        memory.set_yticks(range(len(runs)), [run.name for run in runs])
        memory.invert_yaxis()
        for axis in (memory, time, wire):
            axis.spines["left"].set_visible(False)
            axis.tick_params(left=False)
            axis.grid(axis="x", color="#dddddd", linewidth=0.6)
        made.suptitle(title(comparison), x=0.01, ha="left", fontweight="bold")


def _memory(axis: Any, runs: list[Run]) -> None:
    _stack(axis, runs, COLORS, lambda run: run.peak_split_bytes)
    for place, run in enumerate(runs):
        saved, peak_mb = run.saved(runs[0]), (run.peak or 0) / 1e6
        change = f"  {-saved:+.0%}" if saved and abs(saved) >= 0.005 else ""
        axis.text(peak_mb, place, f"  {_number(peak_mb)}{change}", va="center", fontsize=8)
    axis.set_title("peak memory per rank, MB", loc="left", fontsize=10)
    axis.set_xlim(0, 1.25 * max(run.peak or 0 for run in runs) / 1e6)


def _time(axis: Any, runs: list[Run], comparison: Comparison) -> None:
    ends_ms = []
    for place, run in enumerate(runs):
        if run.step_s is None or run.step_s_spread is None:
            continue
        step_ms, low, high = (1e3 * seconds for seconds in (run.step_s, *run.step_s_spread))
        axis.barh(place, step_ms, height=0.62, color=THEIRS if run.peer else DARK)
        axis.plot([low, high], [place, place], color="black", linewidth=1.2)
        axis.text(max(high, step_ms), place, f"  {_number(step_ms)}", va="center", fontsize=8)
        ends_ms.append(high)
    if comparison.alone_step_s_rounds:
        alone_ms = median(comparison.alone_step_s_rounds) * 1e3
        axis.axvline(alone_ms, color=RED, linewidth=1, linestyle="--", label="without any communication")
        _legend(axis)
    axis.set_title("time of a step, ms (line: 95 % interval)", loc="left", fontsize=10)
    if ends_ms:
        axis.set_xlim(0, 1.2 * max(ends_ms))


def _wire(axis: Any, runs: list[Run]) -> None:
    _stack(axis, runs, WIRE_COLORS, lambda run: run.wire_bytes_per_step)
    expected = [(run.expected_wire_bytes_per_step or 0) / 1e6 for run in runs]
    tops = [place - 0.4 for place in range(len(runs))]
    axis.vlines(expected, tops, [top + 0.8 for top in tops], color="black", linewidth=1.5, label="formula")
    _legend(axis)
    axis.set_title("sent by a rank in a step, MB", loc="left", fontsize=10)
    axis.set_xlim(0, 1.1 * max(1e-9, *expected, *(run.wire_bytes_per_step.get("total", 0) / 1e6 for run in runs)))


def _stack(axis: Any, runs: list[Run], colors: dict[str, str], split: Callable[[Run], dict[str, int]]) -> None:
    lefts = [0.0] * len(runs)
    for kind, color in colors.items():
        widths = [split(run).get(kind, 0) / 1e6 for run in runs]
        axis.barh(range(len(runs)), widths, left=lefts, height=0.62, color=color, label=kind.replace("_", " "))
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    _legend(axis)


def _legend(axis: Any) -> None:
    """A legend below the axis, where it covers no bar."""
    axis.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(-0.02, -0.06), ncols=5, columnspacing=1)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.3g}"
