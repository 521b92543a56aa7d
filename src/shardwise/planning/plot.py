"""A plan as one picture: stacked bars of all presets against the capacity of a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.planning.estimate import CATEGORIES
from shardwise.planning.recommend import PlanRow
from shardwise.planning.report import Plan
from shardwise.plotting import check_path, pyplot
from shardwise.sizes import format_bytes

COLORS = {
    "weights": "#3b6fb6",
    "grads": "#e08a2e",
    "master": "#2f6e46",
    "moments": "#7fb685",
    "in flight": "#b9b9b9",
    "activations": "#b25a8f",
    "logits": "#dba6c6",
    "overhead": "#6b6b6b",
}
CAPACITY = "#c03030"
LONGEST = 3
"""Bars end at this multiple of the capacity, so that presets that are far too large do not shrink the others."""


def draw(plan: Plan, path: str | Path) -> None:
    """Draw the plan into the file `path`."""
    check_path(path)
    plt = pyplot()
    rows, capacity = plan.rows, plan.hardware.gpu_bytes / 1e9
    figure, axis = plt.subplots(figsize=(10, 1.9 + 0.42 * len(rows)), layout="constrained")
    lefts = [0.0] * len(rows)
    for name in CATEGORIES:
        widths = [row.categories[name] / 1e9 for row in rows]
        if any(widths):
            axis.barh(range(len(rows)), widths, left=lefts, height=0.64, color=COLORS[name], label=name)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    axis.axvline(capacity, color=CAPACITY, linewidth=1.4)
    axis.text(capacity, -0.75, f" {format_bytes(plan.hardware.gpu_bytes)}", color=CAPACITY, fontsize=9)
    highest = max(row.peak_bytes / 1e9 for row in rows)
    most = 1.18 * max(capacity, min(highest, LONGEST * capacity))
    for index, row in enumerate(rows):
        _label(axis, index, row, row.preset == plan.advice.preset, most)
    axis.set_yticks(range(len(rows)), [row.preset for row in rows])
    for label, row in zip(axis.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if row.preset == plan.advice.preset else "normal")
    axis.set_ylim(len(rows) - 0.4, -0.95)
    axis.set_xlim(0, most)
    axis.set_xlabel("peak of a rank, GB", fontsize=9)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(left=False)
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    figure.legend(loc="outside lower left", ncols=8, fontsize=8, frameon=False, columnspacing=1.2, handlelength=1.2)
    figure.suptitle(f"{plan.model.name} on {plan.hardware}", x=0.01, ha="left", fontweight="bold")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _label(axis: Any, index: int, row: PlanRow, chosen: bool, most: float) -> None:
    """Write size and verdict beside the bar, or inside it if it is long."""
    tiers = "".join(f", {tier} {format_bytes(size)}" for tier, size in row.tiers.items() if size)
    verdict = "  ← recommended" if chosen else f"  {_verdict(row)}"
    peak = row.peak_bytes / 1e9
    size = f"{peak:.0f}" if peak >= 99.5 else f"{peak:.3g}"
    is_long = peak > 0.8 * most
    where = (min(peak, most), "right", (-8, 0)) if is_long else (peak, "left", (6, 0))
    color = CAPACITY if not row.fits else "black"
    blank = {"facecolor": "white", "edgecolor": "none", "alpha": 0.9, "pad": 1}  # readable over the capacity's line
    text = f"{size}{tiers}{verdict}".rstrip() + (" →" if peak > most else "")
    style = {"va": "center", "ha": where[1], "fontsize": 8.5, "color": color, "bbox": blank}
    axis.annotate(text, (where[0], index), where[2], textcoords="offset points", **style)


def _verdict(row: PlanRow) -> str:
    if not row.is_supported:
        return "not yet possible"
    if row.fits:
        return row.condition.partition(" has")[0] + " is large enough" if row.condition else ""
    return row.note or ("too tight" if row.margin > 0 else "does not fit")
