"""A plan as one table of at most 100 columns, with the recommendation below."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shardwise.planning.arithmetic import STAGES, Accounting, total_bytes
from shardwise.planning.estimate import CATEGORIES
from shardwise.sizes import format_count

if TYPE_CHECKING:
    from shardwise.planning.planner import Plan, Row

WIDTH = 100
SHORT = {"master": "mast.", "moments": "mom.", "in flight": "flight", "activations": "act.", "overhead": "other"}


def text(plan: Plan) -> str:
    """The table as plain text."""
    console = Console(file=io.StringIO(), width=WIDTH)
    console.print(render(plan))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def render(plan: Plan) -> RenderableType:
    how = "a dry run of the engine" if plan.mode == "detailed" else "arithmetic"
    if _is_mixed(plan):
        how += " (~ by arithmetic)"
    parts: list[RenderableType] = [
        Text(_title(plan), style="bold"),
        Text(f"Peak of a rank in GB, by {how}; sent by a rank in a step{_sending(plan)}\n"),
        _table(plan),
        Text(),
        _advice(plan),
    ]
    parts += [Text(f"note: {note}", style="dim") for note in plan.notes]
    return Group(*parts)


def _title(plan: Plan) -> str:
    model, workload = plan.model, plan.workload
    size = format_count(model.parameters)
    parts = [f"{model.name} ({size})" if size not in model.name else model.name, f"on {plan.hardware}"]
    if model.dimensions is not None:
        recompute = ", recomputed" if workload.checkpointing else ""
        parts.append(f"{workload.micro_batch} x {workload.sequence} tokens{recompute}")
    parts += [f"K = {workload.accumulation}"] * (workload.accumulation > 1)
    return "; ".join([", ".join(parts[:2]), ", ".join([*parts[2:], workload.precision, workload.optimizer])])


def _table(plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", no_wrap=True)
    used = [name for name in CATEGORIES if any(_gb(row.categories[name]) for row in plan.rows)]
    tiers = [tier for tier in ("host", "disk") if any(row.tiers.get(tier) for row in plan.rows)]
    knows_shares = any(row.wire_share is not None for row in plan.rows)
    for name in ("peak", "fits", *(SHORT.get(name, name) for name in used), *tiers, "sent", *["share"] * knows_shares):
        table.add_column(name, justify="right", no_wrap=True)
    for row in plan.rows:
        chosen = row.preset == plan.advice.preset
        cells = [*(_gb(row.categories[name]) for name in used), *(_gb(row.tiers.get(tier, 0)) for tier in tiers)]
        mark = "[bold]→ " if chosen else "  "
        table.add_row(
            f"{mark}{escape(row.preset)}",
            f"[bold]{'~' * (_is_mixed(plan) and not row.is_dry_run)}{_gb(row.peak_bytes)}[/]",
            _fits(row),
            *cells,
            _gb(row.wire_bytes),
            *[_share(row.wire_share)] * knows_shares,
        )
    return table


def _sending(plan: Plan) -> str:
    """What the share is one of: it is there where the machine's rates were given."""
    has_shares = any(row.wire_share is not None for row in plan.rows)
    return ",\nand the share: its time over that of computing, under which it can hide" if has_shares else ""


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}" if share < 10 else f"{share:.0f}x"


def _is_mixed(plan: Plan) -> bool:
    return len({row.is_dry_run for row in plan.rows}) > 1


def _fits(row: Row) -> str:
    if not row.is_supported:
        return "[red]not yet[/]"
    if row.fits and row.condition:
        return f"[yellow]{row.condition.partition(' has')[0].replace('the ', '')}?[/]"
    if row.fits:
        return f"[green]yes {row.margin:.0%}[/]"
    short = f"{row.margin:+.0%}" if row.margin > -1 else f"{1 - row.margin:.0f}x"
    why = escape(row.note.partition(" ")[0]) or ("tight" if row.margin >= 0 else short)
    return f"[red]no {why}[/]"


def _advice(plan: Plan) -> Text:
    advice = plan.advice
    return Text(f"→ {advice.preset}: {advice.reason}" if advice.preset else advice.reason, style="bold")


def states(parameters: int, world_size: int, each: Accounting, name: str) -> RenderableType:
    """Model states alone, by one accounting, for all stages."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("", "GB a rank", "of zero0"):
        table.add_column(column, justify="right")
    whole = total_bytes("zero0", parameters, world_size, each)
    for preset in STAGES:
        size = total_bytes(preset, parameters, world_size, each)
        table.add_row(preset, f"{float(size) / 1e9:.4g}", f"1/{float(whole / size):.3g}")
    kinds = f"weights {each.weights} + grads {each.grads} + master {each.master} + moments {each.moments} bytes"
    title = f"Model states of {format_count(parameters)} parameters on {world_size} ranks, accounting {name}"
    return Group(Text(title, style="bold"), Text(kinds), table)


def _gb(size_bytes: int) -> str:
    size = size_bytes / 1e9
    if size < 0.005:
        return "" if size < 0.0005 else f"{size:.3f}"
    return f"{size:.0f}" if size >= 99.95 else f"{size:.1f}" if size >= 0.095 else f"{size:.2f}"
