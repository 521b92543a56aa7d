"""A comparison as text: a table of memory, a table of time, both at most 100 columns wide, and the verdicts."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shardwise.compare.result import Comparison, data_bytes, ratio, verdicts
from shardwise.sizes import format_count

SPLIT = ("weights", "grads", "optim", "activations", "in_flight")
NOTHING = "–"


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
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", justify="left", no_wrap=True)
    for name in columns:
        table.add_column(name.replace("_", " "), justify="right")
    return table


def _mb(size_bytes: int | None) -> str:
    if not size_bytes:
        return NOTHING if size_bytes is None else "0"
    size = size_bytes / 1e6
    return f"{size:.{0 if size >= 99.95 else 1 if size >= 0.95 else 2}f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}" if seconds >= 0.0995 else f"{seconds * 1e3:.1f}"
