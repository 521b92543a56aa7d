"""Shared by all plots: matplotlib without a display, the colors of kinds, and the check of an output path."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.checks import check_output_file
from shardwise.errors import ConfigError

KIND_COLORS = {
    "weights": "#3b6fb6",
    "master": "#7fa3d1",
    "moments": "#5a9e5f",
    "grads": "#e08a2e",
    "activations": "#b25a8f",
    "in flight": "#b9b9b9",
    "other": "#dddddd",
}
DARK, RED = "#2f4b6e", "#c03030"
BAR = 0.63
"""The height of a bar, of the row's."""


def pyplot() -> Any:
    """matplotlib without a display. Raises a ConfigError if it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'shardwise[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


@contextlib.contextmanager
def figure(path: str | Path, rows: int, columns: int, size: tuple[float, float], **options: Any) -> Iterator[Any]:
    """A figure and its axes in rows and columns; written to `path` when the context ends."""
    plt = pyplot()
    made, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **options)
    yield made, axes
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_axisbelow(True)
    made.savefig(path, dpi=150)
    plt.close(made)


def stacked_bars(axis: Any, parts: Mapping[str, Sequence[float]], colors: Mapping[str, str]) -> None:
    """A bar of several parts in each row; `parts` has the lengths of one kind in all rows."""
    lefts: Sequence[float] = [0.0] * max(map(len, parts.values()))
    for kind, widths in parts.items():
        axis.barh(range(len(widths)), widths, left=lefts, height=BAR, color=colors[kind], label=kind.replace("_", " "))
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]


def vertical_grid(axis: Any) -> None:
    """For bars: lines at the values, and no line or ticks beside the names."""
    axis.spines["left"].set_visible(False)
    axis.tick_params(left=False)
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)


def plot_path(path: str | Path, name: str) -> Path:
    """The file to plot to: `path`, or if that is a folder, `name`.png in it. Raises a ConfigError like `check_path`."""
    if Path(path).is_dir():
        path = Path(path) / (re.sub(r"[^\w.-]+", "-", name) + ".png")
    check_path(path)
    return Path(path)


def check_path(path: str | Path) -> None:
    """Raise a ConfigError for a path that cannot be written, before the measurement starts."""
    plt = pyplot()
    kinds = plt.figure().canvas.get_supported_filetypes()
    plt.close("all")
    suffixes = sorted(f".{kind}" for kind in kinds)
    if Path(path).suffix.lower() not in suffixes:
        raise ConfigError(f"--plot {path}: the name must end in one of {', '.join(suffixes)}")
    check_output_file("--plot", path)
