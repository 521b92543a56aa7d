"""The figures of a comparison, their JSON (docs/compare.md describes each field), the statistics of rounds, and the
verdicts: equal bits, memory that falls with the stage, bytes by the formula, peers that agree.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from shardwise.compare.job import ALONE, CompareRow, Settings
from shardwise.config.presets import PRESETS, STAGE_PRESETS
from shardwise.errors import ConfigError, DiskError
from shardwise.files import read_json, validated, writing
from shardwise.sizes import format_bytes

SCHEMA = 1
RESAMPLES = 2000
CONFIDENCE = 0.95
LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 3e-2, "fp16": 3e-2}
"""How far a peer's loss may differ from ours, as a part of the first loss: peers add and cast in another order."""
WIRE_SLACK = 0.001


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The bootstrapped confidence interval of the median of `values`.

    >>> interval([1.0, 1.0, 1.0])
    (1.0, 1.0)
    """
    chance = random.Random(len(values))
    medians = sorted(median(chance.choices(values, k=len(values))) for _ in range(RESAMPLES))
    low = int((1 - CONFIDENCE) / 2 * RESAMPLES)
    return medians[low], medians[RESAMPLES - 1 - low]


def ratio(values: Sequence[float], reference: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """The ratio of `values` to `reference`, round by round: the median, and its confidence interval.

    Two rows of one round see the same noise, so their ratio varies less than either.

    >>> ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    (2.0, (2.0, 2.0))
    """
    ratios = [value / base for value, base in zip(values, reference, strict=False)]
    return median(ratios), interval(ratios)


@dataclass
class Run:
    """The figures of one row. What was not measured, because the row failed before, is empty or None."""

    preset: str
    peer: str | None = None
    peak_bytes: list[int] = field(default_factory=list)
    predicted_peak_bytes: list[int] | None = None
    peak_split_bytes: dict[str, int] = field(default_factory=dict)
    startup_peak_bytes: list[int] = field(default_factory=list)
    peak_rss_bytes: list[int | None] = field(default_factory=list)
    resting_bytes: dict[str, int] = field(default_factory=dict)
    wire_bytes_per_step: dict[str, int] = field(default_factory=dict)
    expected_wire_bytes_per_step: int | None = None
    step_s: float | None = None
    step_s_spread: list[float] | None = None
    step_s_rounds: list[float] = field(default_factory=list)
    comm_share: float | None = None
    losses: list[float] = field(default_factory=list)
    weights_sha256: str | None = None
    wrong: str | None = None
    error: str | None = None

    @property
    def name(self) -> str:
        return CompareRow(self.preset, self.peer).name

    @property
    def peak(self) -> int | None:
        """The highest peak of any rank."""
        return max(self.peak_bytes, default=None)

    @property
    def predicted(self) -> int | None:
        """The highest foreseen peak of any rank."""
        return max(self.predicted_peak_bytes or (), default=None)

    def set_observed(self, ranks: list[dict[str, Any]]) -> None:
        """Store what every rank measured; splits and wire are those of the rank with the highest peak."""
        self.peak_bytes = [rank["peak_bytes"] for rank in ranks]
        self.startup_peak_bytes = [rank["startup_peak_bytes"] for rank in ranks]
        highest = max(ranks, key=lambda rank: int(rank["peak_bytes"]))
        self.peak_split_bytes = highest["peak_split_bytes"]
        self.resting_bytes = highest["resting_bytes"]
        self.wire_bytes_per_step = highest["wire_bytes_per_step"]
        self.expected_wire_bytes_per_step = highest["expected_wire_bytes_per_step"]

    def set_times(self, rounds: list[float]) -> None:
        self.step_s_rounds = rounds
        self.step_s = median(rounds)
        self.step_s_spread = list(interval(rounds))

    def saved(self, first: Run) -> float | None:
        """The part of the first row's peak that this row saves."""
        return 1 - self.peak / first.peak if self.peak is not None and first.peak else None


@dataclass
class Comparison:
    """The figures of all rows, and the settings, versions and hardware of the measurement."""

    settings: Settings
    runs: list[Run]
    parameters: int = 0
    alone_step_s_rounds: list[float] = field(default_factory=list)
    rounds_in_fresh_processes: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)

    @property
    def reference(self) -> Run:
        """The row that times are compared with: DDP if it was timed, else the first."""
        return next((run for run in self.runs if run.peer == "ddp" and run.step_s_rounds), self.runs[0])

    def to_dict(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        settings, runs = data.pop("settings"), data.pop("runs")
        alone = median(self.alone_step_s_rounds) if self.alone_step_s_rounds else None
        return {"schema": SCHEMA, **settings, "alone_step_s": alone, **data, "runs": runs}

    def save(self, path: str | Path) -> None:
        text = json.dumps(self.to_dict(), indent=1) + "\n"
        with writing(Path(path), DiskError, len(text)):
            Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Comparison:
        """Read what `save` wrote."""
        remedy = "write it again with `shardwise compare --json`"
        try:
            data = read_json(Path(path), dict[str, Any], ConfigError, remedy)
        except FileNotFoundError:
            raise ConfigError(f"there is no file {path}: write it with `shardwise compare --json`") from None
        if data.get("schema") != SCHEMA:
            raise ConfigError(f"schema {data.get('schema')!r} is not {SCHEMA}: another version wrote the file")
        settings = {each.name: data[each.name] for each in dataclasses.fields(Settings) if each.name in data}
        own = {each.name: data[each.name] for each in dataclasses.fields(cls) if each.name in data}
        return validated(cls, own | {"settings": settings}, str(path), ConfigError, remedy)


class Verdict(NamedTuple):
    name: str
    is_good: bool
    text: str


def verdicts(comparison: Comparison) -> list[Verdict]:
    """Every verdict that the rows allow: one whose rows are missing is left out."""
    return [*_bits(comparison), *_inversions(comparison), *_wire(comparison), *_failures(comparison)]


def mark_wrong(comparison: Comparison) -> None:
    """Mark the peers whose losses differ from ours: their times and bytes belong to another computation."""
    ours = next((run for run in _ours(comparison) if run.losses), None)
    if ours is None:
        return
    allowed = LOSS_TOLERANCE[comparison.settings.precision] * abs(ours.losses[0])
    for run in comparison.runs:
        if run.peer not in (None, ALONE.peer):
            run.wrong = next(_differences(run, ours, allowed), None)


def _differences(run: Run, ours: Run, allowed: float) -> Iterator[str]:
    for step, (loss, expected) in enumerate(zip(run.losses, ours.losses, strict=False)):
        if not abs(loss - expected) <= allowed:  # written so that NaN disagrees
            yield f"loss {loss:.6g} at step {step}, where {ours.name} has {expected:.6g}"


def _bits(comparison: Comparison) -> Iterator[Verdict]:
    """Stages with the same order of accumulation must agree to the bit. With K = 1 there is only one order."""
    classes: dict[str, list[Run]] = defaultdict(list)
    for run in _ours(comparison):
        if run.weights_sha256 is not None:
            several = comparison.settings.accumulate > 1
            classes[PRESETS[run.preset].grads.sharding if several else "all"].append(run)
    for runs in classes.values():
        steps = len(runs[0].losses)
        if len({run.weights_sha256 for run in runs}) > 1:
            shown = ", ".join(f"{run.name} {str(run.weights_sha256)[:8]}" for run in runs)
            yield Verdict("bits", False, f"weights differ after {steps} steps: {shown}")
        elif len(runs) > 1:
            names = " = ".join(run.name for run in runs)
            yield Verdict("bits", True, f"{names}, every bit of every weight after {steps} steps")


def _inversions(comparison: Comparison) -> Iterator[Verdict]:
    peaks = {run.preset: run.peak for run in _ours(comparison) if run.peak is not None}
    stages = [name for name in STAGE_PRESETS if name in peaks]
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
        if run.error is not None or run.wrong is not None:
            yield Verdict(run.name, False, run.error or f"wrong: {run.wrong}")


def data_bytes(run: Run) -> int:
    """The bytes sent in a step, without control messages."""
    return run.wire_bytes_per_step["gather"] + run.wire_bytes_per_step["reduce"]


def _ours(comparison: Comparison) -> list[Run]:
    return [run for run in comparison.runs if run.peer is None]
