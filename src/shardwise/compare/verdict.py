"""The verdicts of a comparison: equal bits, memory that falls with the stage, bytes by the formula, peers that agree.

Pure functions of a `Comparison`. A verdict whose rows are missing is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from shardwise.compare.job import ALONE, DEFAULT_PRESETS
from shardwise.compare.result import Comparison, Run
from shardwise.config.presets import PRESETS
from shardwise.sizes import format_bytes

LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 3e-2, "fp16": 3e-2}
"""How far a peer's loss may differ from ours, as a part of the first loss: peers add and cast in another order."""
WIRE_SLACK = 0.001


class Verdict(NamedTuple):
    name: str
    is_good: bool
    text: str


def verdicts(comparison: Comparison) -> list[Verdict]:
    """Every verdict that the rows allow."""
    return [*_bits(comparison), *_inversions(comparison), *_wire(comparison), *_failures(comparison)]


def mark_wrong(comparison: Comparison) -> None:
    """Mark the peers whose losses differ from ours: their times and bytes belong to another computation."""
    ours = next((run for run in _ours(comparison) if run.losses), None)
    for run in comparison.runs:
        if ours is not None and run.peer not in (None, ALONE.peer):
            run.wrong = disagreement(run.losses, ours, LOSS_TOLERANCE[comparison.settings.precision])


def disagreement(losses: list[float], ours: Run, tolerance: float) -> str | None:
    """The first step whose loss differs from ours, in words; None if there is none."""
    allowed = tolerance * abs(ours.losses[0])
    for step, (theirs, expected) in enumerate(zip(losses, ours.losses, strict=False)):
        if not abs(theirs - expected) <= allowed:  # written so that NaN disagrees
            return f"loss {theirs:.6g} at step {step}, where {ours.name} has {expected:.6g}"
    return None


def _bits(comparison: Comparison) -> Iterator[Verdict]:
    """Stages with the same order of accumulation must agree to the bit. With K = 1 there is only one order."""
    classes: dict[str, list[Run]] = defaultdict(list)
    for run in _ours(comparison):
        if run.weights_sha256 is not None:
            several = comparison.settings.accumulate > 1
            classes[PRESETS[run.preset].grads.sharding if several else "all"].append(run)
    for runs in classes.values():
        names = " = ".join(run.name for run in runs)
        steps = len(runs[0].losses)
        if len({run.weights_sha256 for run in runs}) > 1:
            shown = ", ".join(f"{run.name} {str(run.weights_sha256)[:8]}" for run in runs)
            yield Verdict("bits", False, f"weights differ after {steps} steps: {shown}")
        elif len(runs) > 1:
            yield Verdict("bits", True, f"{names}, every bit of every weight after {steps} steps")


def _inversions(comparison: Comparison) -> Iterator[Verdict]:
    peaks = {run.preset: run.peak for run in _ours(comparison) if run.peak is not None}
    stages = [name for name in DEFAULT_PRESETS if name in peaks]
    worse = [
        f"{higher} needs {format_bytes(peaks[higher] - peaks[lower])} more than {lower}"
        for lower, higher in pairwise(stages)
        if peaks[higher] > peaks[lower]
    ]
    if worse:
        yield Verdict("memory", False, "upside down: " + "; ".join(worse))
    elif len(stages) > 1:
        yield Verdict("memory", True, "no inversion: " + " ≥ ".join(stages))


def _wire(comparison: Comparison) -> Iterator[Verdict]:
    over = [
        f"{run.name} sends {format_bytes(data_bytes(run))} instead of {format_bytes(expected)}"
        for run in _ours(comparison)
        if (expected := run.expected_wire_bytes_per_step) is not None
        and run.wire_bytes_per_step
        and data_bytes(run) > expected * (1 + WIRE_SLACK)
    ]
    if over:
        yield Verdict("wire", False, "; ".join(over))
    elif any(run.wire_bytes_per_step for run in _ours(comparison)):
        yield Verdict("wire", True, "no more bytes than the formula")


def _failures(comparison: Comparison) -> Iterator[Verdict]:
    for run in comparison.runs:
        if run.error is not None:
            yield Verdict(run.name, False, run.error)
        elif run.wrong is not None:
            yield Verdict(run.name, False, f"wrong: {run.wrong}")


def data_bytes(run: Run) -> int:
    """The bytes sent in a step, without control messages."""
    return run.wire_bytes_per_step["gather"] + run.wire_bytes_per_step["reduce"]


def _ours(comparison: Comparison) -> list[Run]:
    return [run for run in comparison.runs if run.peer is None]
