"""`shardwise compare`: checks its input, shows progress, prints the tables and writes the files."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shardwise.checks import check_output_file
from shardwise.compare import report
from shardwise.compare.job import Settings, parse_rows
from shardwise.compare.session import compare
from shardwise.plotting import plot_path
from shardwise.tables import console_of


def run(settings: Settings, presets: str, peers: str, json: Path | None, plot: Path | None) -> None:
    """Compare, print, and write the requested files. Bad input raises a ConfigError before any process starts."""
    rows = parse_rows(presets, peers)
    if json is not None:
        check_output_file("--json", json)
    if plot is not None:
        plot = plot_path(plot, f"compare-{settings.model}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    errors = Console(stderr=True)
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("starting", total=None)

        started_s = time.monotonic()

        def show(text: str, done: int, total: int) -> None:
            progress.update(task, description=text, completed=done, total=total)
            if not errors.is_terminal:  # a pipe or a file, which shows no bar
                seconds = time.monotonic() - started_s
                print(f"{seconds:>5.0f} s  {done + 1}/{total}  {text}", file=sys.stderr, flush=True)

        comparison = compare(settings, rows, show)
    if json is not None:
        comparison.save(json)
    report.show(comparison, console_of(report.WIDTH))
    if all(run.error is not None for run in comparison.runs):
        raise SystemExit(1)
    if plot is not None:
        report.draw(comparison, plot)
        print(f"wrote {plot}", file=sys.stderr)
