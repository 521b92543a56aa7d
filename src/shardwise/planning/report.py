"""A finished plan: as data, as one table of at most 100 columns, and as the arithmetic behind it."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shardwise.config.costs import formula, resting_kinds, wire_formula
from shardwise.config.presets import PRESETS, STAGE_PRESETS
from shardwise.dry_run.dry_run import CATEGORIES, Estimate
from shardwise.estimate.arithmetic import ACCOUNTINGS, Accounting, saving, state_bytes, total_bytes
from shardwise.estimate.hardware import Hardware
from shardwise.estimate.seconds import BOUNDS, StepTime
from shardwise.models.workload import ModelSpec, Workload
from shardwise.sizes import format_count, three_digits
from shardwise.tables import plain_table

WIDTH = 100
SHORT = {"master": "mast.", "moments": "mom.", "in flight": "flight", "activations": "act.", "overhead": "other"}


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Whether a configuration fits.

    spare         the fraction of a GPU that must stay free, because its figures may be off by as much
    condition     what must be true of parts of the machine whose size was not given
    note          why it does not fit, if not for lack of GPU memory
    is_supported  whether this version of the engine can train with it
    """

    fits: bool
    spare: float = 0.0
    condition: str = ""
    note: str = ""
    is_supported: bool = True


@dataclass(frozen=True)
class PlanRow(Fit, Estimate):
    """One preset of a plan. Bytes of `categories` are of one rank, bytes of `tiers` of one node.

    wire_bytes     what a rank sends in a step
    outside_bytes  what leaves a node in a step
    margin         the free fraction of a GPU's memory
    wire_share     the time of sending over that of computing, if the machine's rates are known
    time           what a step takes, by the model of time
    """

    preset: str
    wire_bytes: int
    outside_bytes: int
    margin: float
    wire_share: float | None
    startup_bytes: int | None
    time: StepTime | None = None

    @property
    def is_close(self) -> bool:
        """Whether it fits with less to spare than its figures may be off."""
        return not self.fits and self.is_supported and not self.note and self.margin >= 0

    @property
    def is_dry_run(self) -> bool:
        """Whether its figures come from a dry run; otherwise they come from arithmetic."""
        return self.startup_bytes is not None


@dataclass(frozen=True)
class Advice:
    """The preset to take, or None if nothing fits, and the reason."""

    preset: str | None
    reason: str


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
    price: float | None = None

    def row(self, preset: str) -> PlanRow:
        """The row of one preset."""
        return next(row for row in self.rows if row.preset == preset)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        data = {"schema": 1, **asdict(self)}
        del data["model"]["build"]
        data["rows"] = [{"preset": row.preset, "peak_bytes": row.peak_bytes, **asdict(row)} for row in self.rows]
        return data

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=WIDTH).print(render(self))
        return text.getvalue()


def render(plan: Plan) -> RenderableType:
    """Title, table, recommendation and notes."""
    how = "a dry run of the engine" if plan.mode == "detailed" else "arithmetic"
    if _is_mixed(plan):
        how += " (~ by arithmetic)"
    notes = list(plan.notes)
    legend = f"Peak of a rank in GB, by {how}; sent by a rank in a step"
    if plan.hardware.nodes > 1:
        legend += "; out: leaves a node"
    if _has_shares(plan):
        legend += ",\nand share: the time of sending over that of computing, under which it can hide"
    spares = sorted({row.spare for row in plan.rows if row.is_close})
    notes += [
        f"<{each:.0%} spare: fits with less than {each:.0%} to spare; its figure may be off by that" for each in spares
    ]
    advice = f"→ {plan.advice.preset}: {plan.advice.reason}" if plan.advice.preset else plan.advice.reason
    timed = next((row.time for row in plan.rows if row.time), None)
    heading = f"\nA step, foreseen; exposed: waits for links, PCIe or disk\n({timed.source})" if timed else ""
    times: list[RenderableType] = [Text(heading), _time_table(plan)] if timed else []
    title = Text(_title(plan), style="bold")
    lines = [Text(f"note: {note}", style="dim") for note in notes]
    return Group(title, Text(legend + "\n"), _table(plan), Text(), Text(advice, style="bold"), *lines, *times)


def _time_table(plan: Plan) -> Table:
    """What a step of each preset takes, by the model of time."""
    has_tokens = any(row.time is not None and row.time.tokens_per_s for row in plan.rows)
    columns = ["", "s a step", *["tokens/s a GPU", "MFU"] * has_tokens, "exposed", "bound by"]
    table = plain_table(*columns, *["$ per 1e9 tokens"] * (plan.price is not None), left=("", "bound by"))
    for row in plan.rows:
        if (time := row.time) is not None:
            dollars = None if plan.price is None else time.dollars_per_billion_tokens(plan.price)
            table.add_row(
                f"  {escape(row.preset)}:",
                three_digits(time.step_s),
                *[f"{time.tokens_per_s or 0:,.0f}", "" if time.mfu is None else f"{time.mfu:.0%}"] * has_tokens,
                f"{(time.exposed_s + time.moving_s) / time.step_s:.0%}",
                BOUNDS[time.bound_by],
                *([] if dollars is None else [f"{dollars:,.0f}"]),
            )
    return table


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
    used = [name for name in CATEGORIES if any(_gb(row.categories[name]) for row in plan.rows)]
    tiers = [tier for tier in ("host", "disk") if any(row.tiers.get(tier) for row in plan.rows)]
    shares = ["share"] * _has_shares(plan)
    outside = ["out"] * (plan.hardware.nodes > 1)
    short = SHORT | ({"weights": "wts.", "logits": "log."} if outside else {})
    named = (short.get(name, name) for name in used)
    table = plain_table("", "peak", "fits", *named, *tiers, "sent", *outside, *shares, gap=1)
    for row in plan.rows:
        mark = "[bold]→ " if row.preset == plan.advice.preset else "  "
        table.add_row(
            f"{mark}{escape(row.preset)}",
            f"[bold]{'~' * (_is_mixed(plan) and not row.is_dry_run)}{_gb(row.peak_bytes)}[/]",
            _fits(row),
            *(_gb(row.categories[name]) for name in used),
            *(_gb(row.tiers.get(tier, 0)) for tier in tiers),
            _gb(row.wire_bytes),
            *[_gb(row.outside_bytes) for _ in outside],
            *[_share(row.wire_share) for _ in shares],
        )
    return table


def _has_shares(plan: Plan) -> bool:
    """Whether the machine's rates were given."""
    return any(row.wire_share is not None for row in plan.rows)


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
    if row.is_close:
        return f"[yellow]<{row.spare:.0%} spare[/]"
    return f"[red]no {escape(row.note.partition(' ')[0]) or short}[/]"


def _gb(size_bytes: int) -> str:
    size = size_bytes / 1e9
    if size < 0.005:
        return "" if size < 0.0005 else f"{size:.3f}"
    return f"{size:.0f}" if size >= 99.95 else f"{size:.1f}" if size >= 0.095 else f"{size:.2f}"


def states(parameters: int, ranks: int, each: Accounting, name: str, sizes: dict[str, Fraction]) -> RenderableType:
    """Model states alone, by one accounting: their `sizes` for all stages."""
    table = plain_table("", "GB a rank", "of zero0", left=())
    for preset, size in sizes.items():
        table.add_row(preset, f"{float(size) / 1e9:.4g}", f"1/{float(sizes['zero0'] / size):.3g}")
    kinds = f"weights {each.weights} + grads {each.grads} + master {each.master} + moments {each.moments} bytes"
    title = (
        f"Model states of {format_count(parameters)} parameters on {ranks} rank{'s' * (ranks > 1)}, accounting {name}"
    )
    return Group(Text(title, style="bold"), Text(kinds), table)


_REST = formula(resting_kinds(PRESETS["zero3"], weights=2, grads=2, moments=8))
_SENT = {preset: f"{wire_formula(PRESETS[preset]).removesuffix('f').replace(' ', ''):<9}" for preset in STAGE_PRESETS}
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
_BESIDES = """
What the table counts besides these states:
  flight   units gathered ahead; gradients that are packed, sent, received and added
  act.     what the forward keeps for the backward; with checkpointing, every layer's input and one layer
  logits   12 bytes each: in fp32, their log-softmax, and its gradient
  other    cuBLAS workspaces, 2 x 32 MiB on Hopper (2 x 8 MiB before); and besides tensors
           {reserved:.2g} GB for the driver's context, communicators and the allocator's part-filled pages"""


def explain(plan: Plan) -> str:
    """The formulas of the states, then the same with the plan's numbers."""
    tp = plan.workload.tp
    parameters, ranks = plan.model.part(tp).trainable, plan.hardware.zero_shape(tp).world_size
    lines = [_WHY, f"In numbers: Ψ = {parameters:,}, W = {ranks}, in GB"]
    lines.append(f"  {'':<8}{'weights':>9}{'grads':>9}{'optim':>9}{'in all':>9}{'saving':>9}{'W → ∞':>9}")
    each = ACCOUNTINGS["fp32" if plan.workload.precision == "fp32" else "full"]
    for preset in STAGE_PRESETS:
        split = state_bytes(preset, parameters, ranks, each)
        sizes = [*split.values(), total_bytes(preset, parameters, ranks, each)]
        limit = "W" if preset == "zero3" else f"{float(saving(preset, 10**12, each)):.3g}x"
        cells = "".join(f"{float(size) / 1e9:>9.4g}" for size in sizes)
        lines.append(f"  {preset:<8}{cells}{float(saving(preset, ranks, each)):>8.3g}x{limit:>9}")
    if plan.model.frozen:
        lines.append(f"Frozen: {plan.model.frozen:,} parameters have only weights, 2 bytes each, sharded under zero3.")
    return "\n".join([*lines, _BESIDES.format(reserved=plan.hardware.reserved_bytes / 1e9)])
