"""Tables without lines, and the console that shows them."""

from __future__ import annotations

from collections.abc import Collection

from rich.console import Console
from rich.table import Table


def plain_table(*columns: str, left: Collection[str] = ("",), gap: int = 2) -> Table:
    """A table whose columns do not wrap; those named in `left` start at the left, the others end at the right."""
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return table


def console_of(width: int) -> Console:
    """A terminal as it is; elsewhere, `width` columns."""
    console = Console()
    return console if console.is_terminal else Console(width=width)
