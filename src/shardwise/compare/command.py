"""`shardwise compare`: checks its input, shows progress, prints the tables and writes the files."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shardwise.compare import table
from shardwise.compare.job import Settings, parse_rows
from shardwise.compare.session import compare
from shardwise.errors import ConfigError
from shardwise.models.built_in import BUILT_IN

WIDTH = 100


def list_models() -> str:
    """The built-in models, one per line."""
    return "\n".join(f"{name:<12}{entry.summary}" for name, entry in BUILT_IN.items())


def run(settings: Settings, presets: str, peers: str, json: Path | None, plot: Path | None) -> None:
    """Compare, print, and write the requested files. Bad input raises a ConfigError before any process starts."""
    rows = parse_rows(presets, peers)
    if json is not None and not json.absolute().parent.is_dir():
        raise ConfigError(f"--json {json}: there is no folder {json.absolute().parent}")
    if plot is not None:
        from shardwise.plotting import check_path

        check_path(plot)
    with _progress() as progress:
        task = progress.add_task("starting", total=None)
        comparison = compare(
            settings,
            rows,
            lambda text, done, total: progress.update(task, description=text, completed=done, total=total),
        )
    if json is not None:
        comparison.save(json)
    console = Console()
    table.show(comparison, console if console.is_terminal else Console(width=WIDTH))
    if all(run.error is not None for run in comparison.runs):
        raise SystemExit(1)
    if plot is not None:
        from shardwise.compare.plot import plot as draw

        draw(comparison, plot)


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
