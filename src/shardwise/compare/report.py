"""A comparison as text and as a figure.

The text is a table of memory, a table of time, both at most `WIDTH` columns wide, and the verdicts. The figure, which
needs matplotlib, shows memory by kind, the time of a step, and bytes sent.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shardwise.compare.result import Comparison, Run, data_bytes, ratio, verdicts
from shardwise.errors import ConfigError
from shardwise.plotting import BAR, DARK, KIND_COLORS, RED, figure, stacked_bars, vertical_grid
from shardwise.sizes import format_count, three_digits
from shardwise.tables import plain_table

WIDTH = 100
SPLIT = ("weights", "grads", "optim", "activations", "in_flight")
NOTHING = "–"
COLORED_AS = {"optim": "moments", "in_flight": "in flight"}
COLORS = {kind: KIND_COLORS[COLORED_AS.get(kind, kind)] for kind in SPLIT}
WIRE_COLORS = {"gather": COLORS["weights"], "reduce": COLORS["grads"], "other": COLORS["in_flight"]}
THEIRS = "#a8b3c2"


def show(comparison: Comparison, console: Console) -> None:
    """Print the tables and the verdicts."""
    console.print(Text(title(comparison), style="bold"))
    if any(run.peak is not None for run in comparison.runs):
        console.print(Text("\nMemory per rank in MB, from outside: peak, as planned, its parts; at rest; the process"))
        console.print(memory_table(comparison))
    if any(run.step_s is not None for run in comparison.runs):
        count = len(comparison.reference.step_s_rounds)
        rounds = "1 round" if count == 1 else f"{count} rounds"
        console.print(Text(f"\nA step: median time and its 95 % interval ({rounds}); MB sent by a rank"))
        console.print(time_table(comparison))
    console.print()
    lines = Table.grid(padding=(0, 1))
    for verdict in verdicts(comparison):
        mark = "[green]✓[/]" if verdict.is_good else "[red]✗[/]"
        lines.add_row(mark, f"[bold]{escape(verdict.name)}[/]", escape(verdict.text))
    console.print(lines)


def title(comparison: Comparison) -> str:
    settings = comparison.settings
    text = f"{settings.model} ({format_count(comparison.parameters)} parameters), {settings.world_size} ranks "
    text += f"on {settings.device}, {settings.precision}"
    return text + (f", {settings.accumulate} micro-batches" if settings.accumulate > 1 else "")


def memory_table(comparison: Comparison) -> Table:
    """The peak of every row, and its parts."""
    table = _table("peak", "plan", "saved", *SPLIT, "rest w", "rest g", "rest o", "RSS")
    for run in comparison.runs:
        if run.peak is None:
            continue
        saved = run.saved(comparison.runs[0])
        table.add_row(
            escape(run.name),
            f"[bold]{_mb(run.peak)}[/]",
            _mb(run.predicted),
            NOTHING if run is comparison.runs[0] or saved is None else f"{saved:.0%}",
            *(_mb(run.peak_split_bytes.get(kind, 0)) for kind in SPLIT),
            *(_mb(run.resting_bytes.get(kind, 0)) for kind in ("weights", "grads", "optim")),
            _mb(max((rss for rss in run.peak_rss_bytes if rss is not None), default=None)),
        )
    return table


def time_table(comparison: Comparison) -> Table:
    """Step times, the cost of communication, bytes sent, losses."""
    reference = comparison.reference
    versus = f"× {reference.name}"
    table = _table("ms", "interval", "× alone", versus, "gather", "reduce", "sent", "/formula", "loss")
    for run in comparison.runs:
        if run.step_s is not None and run.step_s_spread is not None:
            low, high = run.step_s_spread
            wire, expected = run.wire_bytes_per_step, run.expected_wire_bytes_per_step
            table.add_row(
                escape(run.name),
                f"[bold]{_ms(run.step_s)}[/]",
                f"{_ms(low)}–{_ms(high)}" if len(run.step_s_rounds) > 1 else NOTHING,
                _times(run.step_s_rounds, comparison.alone_step_s_rounds),
                "1" if run is reference else _times(run.step_s_rounds, reference.step_s_rounds),
                *(_mb(wire.get(kind)) for kind in ("gather", "reduce", "total")),
                f"{data_bytes(run) / expected:.2f}" if expected and wire else NOTHING,
                f"{run.losses[-1]:.4g}",
            )
    return table


def _times(rounds: list[float], reference: list[float]) -> str:
    if not rounds or not reference:
        return NOTHING
    middle, (low, high) = ratio(rounds, reference)
    return f"{middle:.2f}" + (f" ±{max(high - middle, middle - low):.2f}" if len(rounds) > 1 else "")


def _table(*columns: str) -> Table:
    table = plain_table("", gap=1)
    for name in columns:
        table.add_column(name.replace("_", " "), justify="right")  # the names may wrap
    return table


def _mb(size_bytes: int | None) -> str:
    if not size_bytes:
        return NOTHING if size_bytes is None else "0"
    size = size_bytes / 1e6
    return f"{size:.{0 if size >= 99.95 else 1 if size >= 0.95 else 2}f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}" if seconds >= 0.0995 else f"{seconds * 1e3:.1f}"


def draw(comparison: Comparison, path: str | Path) -> None:
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
            vertical_grid(axis)
        made.suptitle(title(comparison), x=0.01, ha="left", fontweight="bold")


def _memory(axis: Any, runs: list[Run]) -> None:
    _stack(axis, runs, COLORS, lambda run: run.peak_split_bytes)
    for place, run in enumerate(runs):
        saved, peak_mb = run.saved(runs[0]), (run.peak or 0) / 1e6
        change = f"  {-saved:+.0%}" if saved and abs(saved) >= 0.005 else ""
        axis.text(peak_mb, place, f"  {three_digits(peak_mb)}{change}", va="center", fontsize=8)
    axis.set_title("peak memory per rank, MB", loc="left", fontsize=10)
    axis.set_xlim(0, 1.25 * max(run.peak or 0 for run in runs) / 1e6)


def _time(axis: Any, runs: list[Run], comparison: Comparison) -> None:
    ends_ms = []
    for place, run in enumerate(runs):
        if run.step_s is None or run.step_s_spread is None:
            continue
        step_ms, low, high = (1e3 * seconds for seconds in (run.step_s, *run.step_s_spread))
        axis.barh(place, step_ms, height=BAR, color=THEIRS if run.peer else DARK)
        axis.plot([low, high], [place, place], color="black", linewidth=1.2)
        axis.text(max(high, step_ms), place, f"  {three_digits(step_ms)}", va="center", fontsize=8)
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
    stacked_bars(axis, {kind: [split(run).get(kind, 0) / 1e6 for run in runs] for kind in colors}, colors)
    _legend(axis)


def _legend(axis: Any) -> None:
    """A legend below the axis, where it covers no bar."""
    axis.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(-0.02, -0.06), ncols=5, columnspacing=1)
