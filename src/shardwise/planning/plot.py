"""A plan as one picture: stacked bars of all presets against the capacity of a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.compare.plot import check_path, pyplot
from shardwise.planning.estimate import CATEGORIES
from shardwise.sizes import format_bytes

if TYPE_CHECKING:
    from shardwise.planning.planner import Plan

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


def draw(plan: Plan, path: str | Path) -> None:
    """Draw into `path`."""
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
    most = 1.18 * max(capacity, *(row.peak_bytes / 1e9 for row in rows))
    for place, row in enumerate(rows):
        _label(axis, place, row, chosen=row.preset == plan.advice.preset)
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


def _label(axis: Any, place: int, row: Any, chosen: bool) -> None:
    tiers = "".join(f", {tier} {format_bytes(size)}" for tier, size in row.tiers.items() if size)
    verdict = "  ← take this" if chosen else "" if row.fits else "  does not fit"
    size = f"{row.peak_bytes / 1e9:.3g}"
    color = CAPACITY if not row.fits else "black"
    axis.text(row.peak_bytes / 1e9, place, f"  {size}{tiers}{verdict}", va="center", fontsize=8.5, color=color)
