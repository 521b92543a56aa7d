"""The two phases of a comparison: observe every row in fresh processes, then time all rows in interleaved rounds.

    observe   zero0   zero1   zero2   ddp                            memory and bytes; the observers slow training down
    time      zero0 zero1 zero2 ddp | zero1 zero2 ddp zero0 | ...    a few steps per turn, so that noise hits all rows

Between turns the processes wait if the memory of all rows fits at once. Otherwise every turn starts fresh processes.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import Any, Protocol

from shardwise.compare import verdict
from shardwise.compare.job import ALONE, CompareRow, Settings, interpreter
from shardwise.compare.ranks import RowFailed, RowRanks
from shardwise.compare.result import Comparison, Run, ratio
from shardwise.errors import ConfigError
from shardwise.machine import env
from shardwise.machine.launch import cores
from shardwise.machine.memory import host_bytes
from shardwise.models import loading
from shardwise.partition.policy import DTYPES

TURN_STEPS = 4
WARM_STEPS = 2
LEAD_STEPS = 1
RANKS_PER_CORE = 4
MEMORY_PART = 0.8
"""The part of the free memory that waiting processes may use."""


class Progress(Protocol):
    """Receives what is being done, and how much of the whole is done."""

    def __call__(self, text: str, done: int, total: int) -> None: ...


def no_progress(text: str, done: int, total: int) -> None:
    """Show nothing."""


def compare(settings: Settings, rows: Sequence[CompareRow], progress: Progress = no_progress) -> Comparison:
    """Train the same model on the same data in every row, and measure. Bad input raises a ConfigError."""
    check(settings, rows)
    session = CompareSession(settings, rows, progress)
    session.observe()
    session.time()
    comparison = session.comparison
    verdict.mark_wrong(comparison)
    comparison.made = env.made()
    return comparison


def check(settings: Settings, rows: Sequence[CompareRow]) -> None:
    """Raise a ConfigError for what cannot run, before any process starts."""
    loading.check_name(settings.model)
    if settings.precision not in DTYPES:
        raise ConfigError(f"unknown precision {settings.precision!r}: choose from {', '.join(DTYPES)}")
    if settings.accumulate < 1 or settings.steps < 1:
        raise ConfigError(f"steps ({settings.steps}) and accumulate ({settings.accumulate}) are at least 1")
    env.check_device(settings.device)
    most = max(8, RANKS_PER_CORE * cores())
    if not 1 <= settings.world_size <= most:
        raise ConfigError(f"nproc is {settings.world_size}: from 1 to {most} make sense on {cores()} cores")
    for row in rows:
        interpreter(row)


class CompareSession:
    """One comparison while it runs."""

    def __init__(self, settings: Settings, rows: Sequence[CompareRow], progress: Progress) -> None:
        self.settings = settings
        self.rows = list(rows)
        self.comparison = Comparison(settings, [Run(row.preset, row.peer) for row in rows])
        self._runs = dict(zip(rows, self.comparison.runs, strict=True))
        self._progress = progress
        self._turns = list(turns(settings.steps))
        self._done = 0
        self._host_bytes = 0

    def observe(self) -> None:
        """Peak, resting bytes and wire of every row."""
        for row in self.rows:
            self._report(f"{row.name}: memory and bytes sent")
            try:
                with RowRanks(self.settings, row) as ranks:
                    answers = ranks.ask("observe")
            except RowFailed as failure:
                self._runs[row].error = str(failure)
                continue
            self._runs[row].set_observed(answers)
            self._foresee(row)
            self._host_bytes += sum(answer["peak_rss_bytes"] for answer in answers)
            self.comparison.parameters = answers[0]["parameters"]
            self.comparison.versions |= answers[0]["versions"]  # a peer's interpreter has packages that ours lacks

    def _foresee(self, row: CompareRow) -> None:
        """Predict the peak of a preset's row by a dry run, if one can."""
        from shardwise.compare.foresight import foresee_peak

        if row.peer is None:
            peak = foresee_peak(self.settings, row.preset)
            self._runs[row].predicted_peak_bytes = [peak] * self.settings.world_size if peak is not None else None

    def time(self) -> None:
        """Step times, losses and weight hashes of every row that has not failed."""
        rows = [row for row in self.rows if self._runs[row].error is None]
        if rows and self.settings.world_size > 1 and ALONE not in rows:
            rows.append(ALONE)
        fits = self._fits_in_memory()
        self.comparison.rounds_in_fresh_processes = not fits
        timing = (KeptTiming if fits else FreshTiming)(self.settings)
        with timing:
            for number, steps in enumerate(self._turns):
                is_last = number == len(self._turns) - 1
                for row in rotated(rows, number):
                    if row not in timing.errors:
                        self._report(f"{row.name}: round {number + 1} of {len(self._turns)}")
                        timing.turn(row, steps, is_last)
        for row in rows:
            self._store_times(row, timing)

    def _store_times(self, row: CompareRow, timing: Timing) -> None:
        if row == ALONE:
            self.comparison.alone_step_s_rounds = timing.rounds[row]
        if row not in self._runs:
            return
        run = self._runs[row]
        run.error = timing.errors.get(row)
        if run.error is None:
            run.set_times(timing.rounds[row])
            run.losses = timing.losses[row]
            answers = timing.finished[row]
            run.peak_rss_bytes = [answer["peak_rss_bytes"] for answer in answers]
            hashes = {answer["weights_sha256"] for answer in answers}
            run.weights_sha256 = hashes.pop()
            if hashes and row != ALONE:
                run.error = "the ranks ended with different weights"
            if timing.rounds.get(ALONE):
                run.comm_share = max(0.0, 1 - 1 / ratio(run.step_s_rounds, timing.rounds[ALONE])[0])

    def _fits_in_memory(self) -> bool:
        if self._host_bytes > MEMORY_PART * host_bytes("MemAvailable"):
            return False
        if self.settings.device == "cpu":
            return True
        needed = sum(sum(run.peak_bytes) for run in self.comparison.runs)
        return needed <= MEMORY_PART * env.free_device_bytes()

    def _report(self, text: str) -> None:
        total = len(self.rows) + (len(self.rows) + (self.settings.world_size > 1)) * len(self._turns)
        self._progress(text, self._done, total)
        self._done += 1


class Timing:
    """Measured times per row. Subclasses differ in how long the processes live."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rounds: dict[CompareRow, list[float]] = defaultdict(list)
        self.losses: dict[CompareRow, list[float]] = defaultdict(list)
        self.finished: dict[CompareRow, list[dict[str, Any]]] = {}
        self.errors: dict[CompareRow, str] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Timing:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()

    def turn(self, row: CompareRow, steps: int, is_last: bool) -> None:
        """Train `row` for a few steps. Its failure is recorded, and the other rows continue."""
        try:
            with self._ranks(row) as (ranks, lead):
                answers = ranks.ask("steps", lead, steps)
                self.rounds[row].append(median(map(fmean, zip(*(each["step_s"] for each in answers), strict=True))))
                self._note_losses(row, list(map(fmean, zip(*(each["losses"] for each in answers), strict=True))))
                if is_last:
                    self.finished[row] = ranks.ask("finish")
        except RowFailed as failure:
            self.errors[row] = str(failure)

    def _ranks(self, row: CompareRow) -> contextlib.AbstractContextManager[tuple[RowRanks, int]]:
        """Ranks that are ready to train, and the number of steps they need to warm up."""
        raise NotImplementedError

    def _note_losses(self, row: CompareRow, losses: list[float]) -> None:
        self.losses[row] += losses


class KeptTiming(Timing):
    """The processes of a row live from the first round to the last."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._kept: dict[CompareRow, RowRanks] = {}

    @contextlib.contextmanager
    def _ranks(self, row: CompareRow) -> Iterator[tuple[RowRanks, int]]:
        if row in self._kept:
            yield self._kept[row], LEAD_STEPS
        else:
            ranks = self._kept[row] = self._stack.enter_context(RowRanks(self.settings, row))
            ranks.ask("build")
            yield ranks, WARM_STEPS


class FreshTiming(Timing):
    """Every turn starts new processes, which train from the beginning."""

    @contextlib.contextmanager
    def _ranks(self, row: CompareRow) -> Iterator[tuple[RowRanks, int]]:
        with RowRanks(self.settings, row) as ranks:
            ranks.ask("build")
            yield ranks, WARM_STEPS

    def _note_losses(self, row: CompareRow, losses: list[float]) -> None:
        self.losses[row] = losses


def turns(steps: int) -> Iterator[int]:
    """The timed steps of each round.

    >>> list(turns(10))
    [4, 4, 2]
    """
    while steps > 0:
        yield min(steps, TURN_STEPS)
        steps -= TURN_STEPS


def rotated(rows: Sequence[CompareRow], number: int) -> list[CompareRow]:
    """The rows in another order each round, so that no row always follows the same one."""
    start = number % len(rows) if rows else 0
    return [*rows[start:], *rows[:start]]


def five_ways(model: str = "mlp-33m", world_size: int = 2, precision: str = "fp32", device: str = "cpu") -> Comparison:
    """Compare plain training, zero1, zero2, zero3 and CPU offload.

    `shardwise.compare.table.show` prints the result as `shardwise compare` does.
    """
    rows = [ALONE, CompareRow("zero1"), CompareRow("zero2"), CompareRow("zero3"), CompareRow("zero2_offload")]
    return compare(Settings(model, world_size, precision, device, steps=8), rows)
