"""Pictures of plans: the presets against the capacity of a GPU, and ways to train against the number of GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.dry_run.dry_run import CATEGORIES
from shardwise.planning.report import Plan, PlanRow
from shardwise.planning.scaling import PER_NODE, ScalePoint, Scaling
from shardwise.plotting import KIND_COLORS, RED, check_path, figure, stacked_bars, vertical_grid
from shardwise.sizes import format_bytes, three_digits

COLORS = KIND_COLORS | {"logits": "#dba6c6", "overhead": "#6b6b6b"}
LONGEST = 3
"""Bars end at this multiple of the capacity, so that presets that are far too large do not shrink the others."""
_WAYS = ("#3b6fb6", "#7fa3d1", "#2f6e46", "#e08a2e", "#b25a8f", "#6b6b6b")


def draw_plan(plan: Plan, path: str | Path) -> None:
    """Draw the plan into the file `path`."""
    check_path(path)
    rows, capacity = plan.rows, plan.hardware.gpu_bytes / 1e9
    with figure(path, 1, 1, (10, 1.9 + 0.42 * len(rows))) as (made, ((axis,),)):
        parts = {name: [row.categories[name] / 1e9 for row in rows] for name in CATEGORIES}
        stacked_bars(axis, {name: widths for name, widths in parts.items() if any(widths)}, COLORS)
        axis.axvline(capacity, color=RED, linewidth=1.4)
        axis.text(capacity, -0.75, f" {format_bytes(plan.hardware.gpu_bytes)}", color=RED, fontsize=9)
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
        vertical_grid(axis)
        made.legend(loc="outside lower left", ncols=8, fontsize=8, frameon=False, columnspacing=1.2, handlelength=1.2)
        made.suptitle(f"{plan.model.name} on {plan.hardware}", x=0.01, ha="left", fontweight="bold")


def _label(axis: Any, index: int, row: PlanRow, chosen: bool, most: float) -> None:
    """Write size and verdict beside the bar, or inside it if it is long."""
    tiers = "".join(f", {tier} {format_bytes(size)}" for tier, size in row.tiers.items() if size)
    verdict = "  ← recommended" if chosen else f"  {_verdict(row)}"
    peak = row.peak_bytes / 1e9
    is_long = peak > 0.8 * most
    where = (min(peak, most), "right", (-8, 0)) if is_long else (peak, "left", (6, 0))
    color = RED if not row.fits else "black"
    blank = {"facecolor": "white", "edgecolor": "none", "alpha": 0.9, "pad": 1}  # readable over the capacity's line
    text = f"{three_digits(peak)}{tiers}{verdict}".rstrip() + (" →" if peak > most else "")
    style = {"va": "center", "ha": where[1], "fontsize": 8.5, "color": color, "bbox": blank}
    axis.annotate(text, (where[0], index), where[2], textcoords="offset points", **style)


def _verdict(row: PlanRow) -> str:
    if not row.is_supported:
        return "not yet possible"
    if row.fits:
        return row.condition.partition(" has")[0] + " is large enough" if row.condition else ""
    return row.note or (f"fits with less than {row.spare:.0%} to spare" if row.is_close else "does not fit")


def draw_scaling(found: Scaling, path: str | Path) -> None:
    """Step, efficiency, exposed communication and memory against GPUs."""
    check_path(path)
    with figure(path, 2, 2, (11, 8)) as (made, axes):
        panels: tuple[tuple[str, Callable[[ScalePoint], float]], ...] = (
            ("step, s", lambda point: point.time.step_s),
            ("efficiency", lambda point: point.efficiency),
            ("exposed communication, part of the step", lambda point: point.exposed),
            ("peak of a GPU, GB", lambda point: point.peak_bytes / 1e9),
        )
        for axis, (title, value) in zip(axes.flat, panels, strict=True):
            axis.set_title(title, fontsize=10, loc="left")
            _draw_ways(axis, found, value)
        axes[0][1].set_ylim(0, 1.05)
        axes[1][0].set_ylim(bottom=0)
        for axis in (axes[0][0], axes[1][1]):
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("")
        axes[1][1].axhline(found.gpu_bytes / 1e9, color=RED, linewidth=1.2)
        for axis in axes[1]:
            axis.set_xlabel("GPUs", fontsize=9)
        handles, labels = axes[0][0].get_legend_handles_labels()
        made.legend(handles, labels, loc="outside lower center", ncols=6, fontsize=9, frameon=False)
        made.suptitle(f"{found.model.name} on {PER_NODE} GPUs a node (hollow: does not fit)", fontweight="bold")


def _draw_ways(axis: Any, found: Scaling, value: Callable[[ScalePoint], float]) -> None:
    """A line of each way over the numbers of GPUs."""
    for color, way in zip(_WAYS, found.ways, strict=False):
        points = [point for gpus in found.counts if (point := found.at(way, gpus))]
        axis.plot([p.gpus for p in points], [value(p) for p in points], color=color, label=way, linewidth=1.6)
        for point in points:
            face = color if point.fits else "white"
            axis.plot([point.gpus], [value(point)], "o", color=color, markerfacecolor=face, markersize=5)
    axis.set_xscale("log", base=2)
    axis.set_xticks(found.counts, [str(count) for count in found.counts], minor=False)
    axis.grid(color="#dddddd", linewidth=0.6)
