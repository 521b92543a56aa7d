"""The output of a run: a live bar on a terminal, plain lines elsewhere, and nothing on ranks other than 0."""

from __future__ import annotations

import contextlib
import math
import sys
from typing import Any, TextIO, cast

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from shardwise.train.folder import StepMetrics


class Screen:
    """Where a run shows its progress. This one shows nothing, for ranks other than 0."""

    def say(self, label: str, text: str) -> None:
        """Show a fact, under a short label."""

    def start(self, step: int, steps: int) -> None:
        """Training starts at `step`, of `steps`."""

    def advance(self, step: int) -> None:
        """`step` steps are done."""

    def show(self, row: StepMetrics, eta_s: float) -> None:
        """Show the metrics of a step, and the time left."""

    def stop(self) -> None:
        """Training ends or pauses."""

    def text(self, title: str, text: str) -> None:
        """Show a title and several lines of text."""


class PlainScreen(Screen):
    """Lines without control codes, for files and pipes."""

    _steps = 0

    def say(self, label: str, text: str) -> None:
        self._print(f"{label:<9}{text}")

    def start(self, step: int, steps: int) -> None:
        self._steps = steps

    def show(self, row: StepMetrics, eta_s: float) -> None:
        width = len(str(self._steps))
        self._print(f"step {row.step:>{width}}/{self._steps}  {_figures(row)}  left {duration(eta_s)}")

    def text(self, title: str, text: str) -> None:
        self._print(f"\n--- {title}\n{text.rstrip()}\n---\n")

    def _print(self, text: str) -> None:
        print(text, file=SurvivingStream(sys.stdout), flush=True)


class LiveScreen(Screen):
    """A progress bar with the newest metrics beside it."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("[bold]{task.completed}[/]/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        )
        self._console = console
        self._progress = Progress(*columns, console=console, expand=True)
        self._task = TaskID(0)
        self._val_loss: float | None = None

    def say(self, label: str, text: str) -> None:
        self._console.print(Text.assemble((f"{label:<9}", "bold cyan"), text))

    def start(self, step: int, steps: int) -> None:
        self._task = self._progress.add_task("train", completed=step, total=steps, figures="first step ...")
        self._progress.start()

    def advance(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def show(self, row: StepMetrics, eta_s: float) -> None:
        self._val_loss = self._val_loss if row.val_loss is None else row.val_loss
        self._progress.update(self._task, figures=_figures(row, self._val_loss))

    def stop(self) -> None:
        self._progress.stop()

    def text(self, title: str, text: str) -> None:
        self._console.print(Panel(Text(text.rstrip()), title=title, title_align="left", border_style="cyan"))


class SurvivingStream:
    """A stream that ignores write errors: if its terminal or pipe is closed, the run must still save."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def make_screen(rank: int) -> Screen:
    """The screen for a rank's standard output."""
    if rank != 0:
        return Screen()
    return LiveScreen(Console(file=cast(TextIO, SurvivingStream(sys.stdout)))) if sys.stdout.isatty() else PlainScreen()


def _figures(row: StepMetrics, val_loss: float | None = None) -> str:
    """The metrics in fixed widths, so that columns line up."""
    val_loss = val_loss if row.val_loss is None else row.val_loss
    validated = f"  val {val_loss:.3f}" if val_loss is not None else ""
    memory = f"memory {row.memory_bytes / 1e6:.0f} MB (peak {row.peak_bytes / 1e6:.0f})"
    return f"loss {row.loss:.3f}{validated}  {row.tokens_per_s:>6.0f} tokens/s  {memory}"


def duration(seconds: float) -> str:
    """Minutes and seconds, or hours and minutes.

    >>> duration(75), duration(2 * 3600 + 5 * 60), duration(float("nan"))
    ('1:15', '2h05', '?')
    """
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}h{minutes % 60:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
