"""A finished plan: as data, as one table of at most 100 columns, and as the arithmetic behind it."""

from __future__ import annotations

import dataclasses
import io
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shardwise.config.costs import formula, resting_kinds, wire_formula
from shardwise.config.presets import PRESETS
from shardwise.planning.arithmetic import ACCOUNTINGS, STAGES, Accounting, saving, state_bytes, total_bytes
from shardwise.planning.estimate import CATEGORIES
from shardwise.planning.hardware import Hardware
from shardwise.planning.recommend import Advice, PlanRow
from shardwise.planning.workload import ModelSpec, Workload
from shardwise.sizes import format_count

WIDTH = 100
SHORT = {"master": "mast.", "moments": "mom.", "in flight": "flight", "activations": "act.", "overhead": "other"}


@dataclass(frozen=True)
class Plan:
    """All presets on one machine for one workload, and the recommended one. `print(plan)` shows the table."""

    model: ModelSpec
    workload: Workload
    hardware: Hardware
    rows: list[PlanRow]
    advice: Advice
    mode: str
    notes: list[str] = field(default_factory=list)

    def row(self, preset: str) -> PlanRow:
        """The row of one preset."""
        return next(row for row in self.rows if row.preset == preset)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        of = self.model.dimensions
        return {
            "schema": 1,
            "model": {
                "name": self.model.name,
                "parameters": self.model.parameters,
                "trainable": self.model.trainable,
                "dimensions": dataclasses.asdict(of) if of else None,
            },
            "hardware": dataclasses.asdict(self.hardware),
            "workload": dataclasses.asdict(self.workload),
            "mode": self.mode,
            "rows": [{**dataclasses.asdict(row), "peak_bytes": row.peak_bytes} for row in self.rows],
            "advice": dataclasses.asdict(self.advice),
            "notes": self.notes,
        }

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=WIDTH)
        console.print(render(self))
        file = console.file
        assert isinstance(file, io.StringIO)
        return file.getvalue()


def render(plan: Plan) -> RenderableType:
    """Title, table, recommendation and notes."""
    how = "a dry run of the engine" if plan.mode == "detailed" else "arithmetic"
    if _is_mixed(plan):
        how += " (~ by arithmetic)"
    parts: list[RenderableType] = [
        Text(_title(plan), style="bold"),
        Text(f"Peak of a rank in GB, by {how}; sent by a rank in a step{_share_legend(plan)}\n"),
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
    shares = ["share"] * _has_shares(plan)
    for name in ("peak", "fits", *(SHORT.get(name, name) for name in used), *tiers, "sent", *shares):
        table.add_column(name, justify="right", no_wrap=True)
    for row in plan.rows:
        mark = "[bold]→ " if row.preset == plan.advice.preset else "  "
        table.add_row(
            f"{mark}{escape(row.preset)}",
            f"[bold]{'~' * (_is_mixed(plan) and not row.is_dry_run)}{_gb(row.peak_bytes)}[/]",
            _fits(row),
            *(_gb(row.categories[name]) for name in used),
            *(_gb(row.tiers.get(tier, 0)) for tier in tiers),
            _gb(row.wire_bytes),
            *[_share(row.wire_share) for _ in shares],
        )
    return table


def _has_shares(plan: Plan) -> bool:
    """Whether the machine's rates were given."""
    return any(row.wire_share is not None for row in plan.rows)


def _share_legend(plan: Plan) -> str:
    legend = ",\nand share: the time of sending over that of computing, under which it can hide"
    return legend if _has_shares(plan) else ""


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}" if share < 10 else f"{share:.0f}x"


def _is_mixed(plan: Plan) -> bool:
    return len({row.is_dry_run for row in plan.rows}) > 1


def _fits(row: PlanRow) -> str:
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


def _gb(size_bytes: int) -> str:
    size = size_bytes / 1e9
    if size < 0.005:
        return "" if size < 0.0005 else f"{size:.3f}"
    return f"{size:.0f}" if size >= 99.95 else f"{size:.1f}" if size >= 0.095 else f"{size:.2f}"


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


_REST = formula(resting_kinds(PRESETS["zero3"], weights=2, grads=2, moments=8))
_SENT = {preset: f"{wire_formula(PRESETS[preset]).removesuffix('f').replace(' ', ''):<9}" for preset in STAGES}
_WHY = f"""\
Where the bytes come from, in 16-bit training with Adam:
  weights  2Ψ   the weights that the model computes with, in bf16 or fp16
  grads    2Ψ   one gradient per weight (4Ψ if several micro-batches are accumulated in fp32)
  optim   12Ψ   4Ψ fp32 master weights, without which small updates would be rounded away,
                4Ψ Adam's first moment, 4Ψ its second, both in fp32
  in all  16Ψ = 2Ψ + 2Ψ + 12Ψ

What each stage divides by W, the number of ranks:
  zero1  2Ψ + 2Ψ + 12Ψ/W     optimizer states; 4Ψ remain for many ranks: a quarter, so the saving tends to 4x
  zero2  2Ψ + (2Ψ + 12Ψ)/W   gradients too; 2Ψ remain: an eighth, so the saving tends to 8x
  zero3  (2Ψ + 2Ψ + 12Ψ)/W   everything; the saving is W x, without a limit
  This engine casts zero3's weights from the master when it gathers them: {_REST} rest.

What a rank sends in a step, each element to every other rank, so times (W-1)/W:
  zero0, zero1   {_SENT["zero1"]} gradients (Ψ) and, after the update, weights (zero0: reduced gradients) (Ψ)
  zero2          {_SENT["zero2"]} gradients are reduced for every micro-batch; with K = 1 the same 2Ψ
  zero3          {_SENT["zero3"]} weights for the forward, again for the backward, and gradients; per micro-batch
"""


def explain(plan: Plan) -> str:
    """The formulas of the states, then the same with the plan's numbers."""
    parameters, ranks = plan.model.trainable, plan.hardware.gpus
    lines = [_WHY, f"In numbers: Ψ = {parameters:,}, W = {ranks}, in GB"]
    lines.append(f"  {'':<8}{'weights':>9}{'grads':>9}{'optim':>9}{'in all':>9}{'saving':>9}{'W → ∞':>9}")
    each = ACCOUNTINGS["fp32" if plan.workload.precision == "fp32" else "full"]
    for preset in STAGES:
        split = state_bytes(preset, parameters, ranks, each)
        sizes = [*split.values(), total_bytes(preset, parameters, ranks, each)]
        limit = "W" if preset == "zero3" else f"{float(saving(preset, 10**12, each)):.3g}x"
        cells = "".join(f"{float(size) / 1e9:>9.4g}" for size in sizes)
        lines.append(f"  {preset:<8}{cells}{float(saving(preset, ranks, each)):>8.3g}x{limit:>9}")
    if plan.model.frozen:
        lines.append(f"Frozen: {plan.model.frozen:,} parameters have only weights, 2 bytes each, sharded under zero3.")
    lines += ["", *_overheads(plan)]
    return "\n".join(lines)


def _overheads(plan: Plan) -> list[str]:
    reserved = plan.hardware.reserved_bytes / 1e9
    return [
        "What the table counts besides these states:",
        "  flight   units gathered ahead; gradients that are packed, sent, received and added",
        "  act.     what the forward keeps for the backward; with checkpointing, every layer's input and one layer",
        "  logits   12 bytes each: in fp32, their log-softmax, and its gradient",
        "  other    cuBLAS workspaces, 2 x 32 MiB on Hopper (2 x 8 MiB before); and besides tensors",
        f"           {reserved:.2g} GB for the driver's context, communicators and the allocator's part-filled pages",
    ]
