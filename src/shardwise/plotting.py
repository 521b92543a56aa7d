"""Shared by all plots: matplotlib without a display, and the check of an output path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError


def pyplot() -> Any:
    """matplotlib without a display. Raises a ConfigError if it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'shardwise[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def check_path(path: str | Path) -> None:
    """Raise a ConfigError for a path that cannot be written, before the measurement starts."""
    plt = pyplot()
    kinds = plt.figure().canvas.get_supported_filetypes()
    plt.close("all")
    suffix = Path(path).suffix.lstrip(".").lower()
    if suffix not in kinds:
        raise ConfigError(
            f"--plot {path}: the name must end in one of {', '.join('.' + kind for kind in sorted(kinds))}"
        )
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {Path(path).absolute().parent}")
