"""The order of things: every row observed in processes of its own, then all of them timed in interleaved rounds.

    observe   zero0   zero1   zero2   ddp                    memory and bytes: slow, so apart from the clock
    time      zero0 zero1 zero2 ddp | zero1 zero2 ddp zero0 | ...   a few steps each, in turns, so that noise hits all

Between turns the processes wait, where their memory fits beside each other; else every turn starts fresh ones.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import Any, Protocol

from shardwise.compare import stats, verdict
from shardwise.compare.crew import Crew, CrewFailed
from shardwise.compare.job import Settings
from shardwise.compare.result import Comparison, Run
from shardwise.compare.rows import ALONE, Row, interpreter
from shardwise.errors import ConfigError
from shardwise.machine import env
from shardwise.machine.launch import cores
from shardwise.models import loading
from shardwise.partition.policy import DTYPES

TURN_STEPS = 4
WARM_STEPS = 2
LEAD_STEPS = 1
RANKS_PER_CORE = 4
MEMORY_PART = 0.8
"""The part of the free memory that waiting processes may take."""


class Progress(Protocol):
    """StepScalars what is being done, and how far the whole is."""

    def __call__(self, text: str, done: int, total: int) -> None: ...


def quiet(text: str, done: int, total: int) -> None:
    """No progress."""


def compare(settings: Settings, rows: Sequence[Row], progress: Progress = quiet) -> Comparison:
    """Train the same model with the same data as every row does, and measure. Bad input is a ConfigError."""
    check(settings, rows)
    session = Session(settings, rows, progress)
    session.observe()
    session.time()
    comparison = session.comparison
    verdict.mark_wrong(comparison)
    comparison.made = env.made()
    return comparison


def check(settings: Settings, rows: Sequence[Row]) -> None:
    """Refuse what cannot run, before anything is started."""
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


class Session:
    """One comparison in the making."""

    def __init__(self, settings: Settings, rows: Sequence[Row], progress: Progress) -> None:
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
            self._tell(f"{row.name}: memory and bytes sent")
            try:
                with Crew(self.settings, row) as crew:
                    ranks = crew.ask("observe")
            except CrewFailed as failure:
                self._runs[row].error = str(failure)
                continue
            self._runs[row].set_observed(ranks)
            self._foresee(row)
            self._host_bytes += sum(rank["peak_rss_bytes"] or 0 for rank in ranks)
            self.comparison.parameters = ranks[0]["parameters"]
            self.comparison.versions |= ranks[0]["versions"]  # a peer's interpreter has packages that ours lacks

    def _foresee(self, row: Row) -> None:
        """What the plan says of a row of ours, where it can say anything."""
        from shardwise.planning.runs import foresee_peaks

        if row.peer is None:
            peak = foresee_peaks(self.settings, [row.preset])[row.preset]
            self._runs[row].predicted_peak_bytes = [peak] * self.settings.world_size if peak is not None else None

    def time(self) -> None:
        """Seconds per step, losses and hashes of every row that lives."""
        rows = [row for row in self.rows if self._runs[row].error is None]
        if rows and self.settings.world_size > 1 and ALONE not in rows:
            rows.append(ALONE)
        fits = self._fits_in_memory()
        self.comparison.rounds_in_fresh_processes = not fits
        timing = (Kept if fits else Fresh)(self.settings, rows)
        with timing:
            for number, steps in enumerate(self._turns):
                is_last = number == len(self._turns) - 1
                for row in rotated(rows, number):
                    if row not in timing.errors:
                        self._tell(f"{row.name}: round {number + 1} of {len(self._turns)}")
                        timing.turn(row, steps, is_last)
        for row in rows:
            self._take(row, timing)

    def _take(self, row: Row, timing: Timing) -> None:
        if row == ALONE:
            self.comparison.alone_step_s_rounds = timing.rounds[row]
        if row not in self._runs:
            return
        run = self._runs[row]
        run.error = timing.errors.get(row)
        if run.error is None:
            run.set_times(timing.rounds[row])
            run.losses = timing.losses[row]
            finish = timing.finished[row]
            run.peak_rss_bytes = [rank["peak_rss_bytes"] for rank in finish]
            hashes = {rank["weights_sha256"] for rank in finish}
            run.weights_sha256 = hashes.pop()
            if hashes and row != ALONE:
                run.error = "the ranks ended with different weights"
            if timing.rounds.get(ALONE):
                run.comm_share = max(0.0, 1 - 1 / stats.ratio(run.step_s_rounds, timing.rounds[ALONE])[0])

    def _fits_in_memory(self) -> bool:
        if self._host_bytes > MEMORY_PART * env.free_host_bytes():
            return False
        if self.settings.device == "cpu":
            return True
        needed = sum(sum(run.peak_bytes) for run in self.comparison.runs)
        return needed <= MEMORY_PART * env.free_device_bytes()

    def _tell(self, text: str) -> None:
        total = len(self.rows) + (len(self.rows) + (self.settings.world_size > 1)) * len(self._turns)
        self._progress(text, self._done, total)
        self._done += 1


class Timing:
    """What the clock said, per row; subclasses differ in how long processes live."""

    def __init__(self, settings: Settings, rows: Sequence[Row]) -> None:
        self.settings = settings
        self.rounds: dict[Row, list[float]] = defaultdict(list)
        self.losses: dict[Row, list[float]] = defaultdict(list)
        self.finished: dict[Row, list[dict[str, Any]]] = {}
        self.errors: dict[Row, str] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Timing:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()

    def turn(self, row: Row, steps: int, is_last: bool) -> None:
        """Let `row` train a few steps; its failure is noted and the others go on."""
        try:
            with self._crew(row) as (crew, lead):
                ranks = crew.ask("steps", lead, steps)
                self.rounds[row].append(median(map(fmean, zip(*(rank["step_s"] for rank in ranks), strict=True))))
                self._note_losses(row, list(map(fmean, zip(*(rank["losses"] for rank in ranks), strict=True))))
                if is_last:
                    self.finished[row] = crew.ask("finish")
        except CrewFailed as failure:
            self.errors[row] = str(failure)

    def _crew(self, row: Row) -> contextlib.AbstractContextManager[tuple[Crew, int]]:
        """A crew that is ready to train, and how many steps it needs to get going."""
        raise NotImplementedError

    def _note_losses(self, row: Row, losses: list[float]) -> None:
        self.losses[row] += losses


class Kept(Timing):
    """Processes live from the first round to the last."""

    def __init__(self, settings: Settings, rows: Sequence[Row]) -> None:
        super().__init__(settings, rows)
        self._crews: dict[Row, Crew] = {}

    @contextlib.contextmanager
    def _crew(self, row: Row) -> Iterator[tuple[Crew, int]]:
        if row in self._crews:
            yield self._crews[row], LEAD_STEPS
        else:
            crew = self._crews[row] = self._stack.enter_context(Crew(self.settings, row))
            crew.ask("build")
            yield crew, WARM_STEPS


class Fresh(Timing):
    """New processes for every turn; each starts training anew."""

    @contextlib.contextmanager
    def _crew(self, row: Row) -> Iterator[tuple[Crew, int]]:
        with Crew(self.settings, row) as crew:
            crew.ask("build")
            yield crew, WARM_STEPS

    def _note_losses(self, row: Row, losses: list[float]) -> None:
        self.losses[row] = losses


def turns(steps: int) -> Iterator[int]:
    """The timed steps of each round.

    >>> list(turns(10))
    [4, 4, 2]
    """
    while steps > 0:
        yield min(steps, TURN_STEPS)
        steps -= TURN_STEPS


def rotated(rows: Sequence[Row], number: int) -> list[Row]:
    """Every round begins with another row, so that none always follows the same."""
    start = number % len(rows) if rows else 0
    return [*rows[start:], *rows[:start]]


def five_ways(model: str = "mlp-33m", world_size: int = 2, precision: str = "fp32", device: str = "cpu") -> Comparison:
    """The classic experiment: plain training, zero1, zero2, zero3 and CPU offload, each in processes of its own.

    `print(five_ways())` shows the two tables of `shardwise compare`, with what each saves.
    """
    rows = [ALONE, Row("zero1"), Row("zero2"), Row("zero3"), Row("zero2_offload")]
    return compare(Settings(model, world_size, precision, device, steps=8), rows)
