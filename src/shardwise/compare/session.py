"""The two phases of a comparison: observe every row in fresh processes, then time all rows in interleaved rounds.

    observe   zero0   zero1   zero2   ddp                            memory and bytes; the observers slow training down
    time      zero0 zero1 zero2 ddp | zero1 zero2 ddp zero0 | ...    a few steps per turn, so that noise hits all rows

Between turns the processes wait if the memory of all rows fits at once. Otherwise every turn starts fresh processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import torch

from shardwise.compare.job import ALONE, CompareRow, Settings, config_for, interpreter
from shardwise.compare.result import Comparison, Run, mark_wrong, ratio
from shardwise.compare.row_ranks import RowFailed, RowRanks
from shardwise.config import Config
from shardwise.errors import ConfigError
from shardwise.machine import env, launch
from shardwise.machine.memory import host_bytes
from shardwise.models import loading
from shardwise.partition.policy import DTYPES

if TYPE_CHECKING:
    from shardwise.dry_run.dry_run import Foreseen

TURN_STEPS = 4
WARM_STEPS = 2
LEAD_STEPS = 1
RANKS_PER_CORE = 4
MEMORY_PART = 0.8
"""The part of the free memory that waiting processes may use."""


Progress = Callable[[str, int, int], object]
"""Receives what is being done, and how much of the whole is done."""


def compare(settings: Settings, rows: Sequence[CompareRow], progress: Progress = lambda *_: None) -> Comparison:
    """Train the same model on the same data in every row, and measure. Bad input raises a ConfigError."""
    check(settings, rows)
    session = CompareSession(settings, rows, progress)
    session.observe()
    session.time()
    mark_wrong(session.comparison)
    session.comparison.made = env.made()
    return session.comparison


def check(settings: Settings, rows: Sequence[CompareRow]) -> None:
    """Raise a ConfigError for what cannot run, before any process starts."""
    loading.check_name(settings.model)
    if settings.precision not in DTYPES:
        raise ConfigError(f"unknown precision {settings.precision!r}: choose from {', '.join(DTYPES)}")
    if settings.accumulate < 1 or settings.steps < 1:
        raise ConfigError(f"steps ({settings.steps}) and accumulate ({settings.accumulate}) are at least 1")
    if settings.device not in ("cpu", "cuda"):
        raise ConfigError(f"unknown device {settings.device!r}: choose cpu or cuda")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda: torch finds no CUDA device here (`shardwise env` says more)")
    most = max(8, RANKS_PER_CORE * launch.cores())
    if not 1 <= settings.world_size <= most:
        raise ConfigError(f"nproc is {settings.world_size}: from 1 to {most} make sense on {launch.cores()} cores")
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
        self._turns = turns(settings.steps)
        self._done = 0
        self._host_bytes = 0

    def observe(self) -> None:
        """Peak, resting bytes and wire of every row."""
        for row in self.rows:
            self._report(f"{row.name}: memory and bytes sent")
            try:
                with contextlib.closing(RowRanks(self.settings, row)) as ranks:
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
        from shardwise.dry_run.dry_run import Untraceable

        if row.peer is None:
            with contextlib.suppress(Untraceable, ValueError):
                peak_bytes = foresee_settings(self.settings, row.preset).peak_bytes
                self._runs[row].predicted_peak_bytes = [peak_bytes] * self.settings.world_size

    def time(self) -> None:
        """Step times, losses and weight hashes of every row that has not failed."""
        rows = [row for row in self.rows if self._runs[row].error is None]
        if rows and self.settings.world_size > 1 and ALONE not in rows:
            rows.append(ALONE)
        fits = self._fits_in_memory()
        self.comparison.rounds_in_fresh_processes = not fits
        timed = [TimedRow(self.settings, row, keeps_ranks=fits) for row in rows]
        with contextlib.ExitStack() as stack:
            for each in timed:
                stack.callback(each.end)
            for number, steps in enumerate(self._turns):
                for each in rotated(timed, number):
                    if each.error is None:
                        self._report(f"{each.row.name}: round {number + 1} of {len(self._turns)}")
                        each.turn(steps, is_last=number == len(self._turns) - 1)
        alone = self.comparison.alone_step_s_rounds = next((each.rounds for each in timed if each.row == ALONE), [])
        for each in timed:
            if each.row in self._runs:
                each.store(self._runs[each.row], alone)

    def _fits_in_memory(self) -> bool:
        if self._host_bytes > MEMORY_PART * host_bytes("MemAvailable"):
            return False
        if self.settings.device == "cpu":
            return True
        needed = sum(sum(run.peak_bytes) for run in self.comparison.runs)
        free = sum(torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count()))
        return needed <= MEMORY_PART * free

    def _report(self, text: str) -> None:
        total = len(self.rows) + (len(self.rows) + (self.settings.world_size > 1)) * len(self._turns)
        self._progress(text, self._done, total)
        self._done += 1


class TimedRow:
    """A row in the rounds. With `keeps_ranks`, its processes live from the first round to the last.

    Otherwise every turn starts new processes, which train from the beginning.
    """

    def __init__(self, settings: Settings, row: CompareRow, keeps_ranks: bool) -> None:
        self.settings = settings
        self.row = row
        self.rounds: list[float] = []
        self.error: str | None = None
        self._keeps_ranks = keeps_ranks
        self._ranks: RowRanks | None = None
        self._losses: list[float] = []
        self._finished: list[dict[str, Any]] = []

    def turn(self, steps: int, is_last: bool) -> None:
        """Train for a few steps. A failure is recorded, and the other rows continue."""
        try:
            lead = LEAD_STEPS
            if self._ranks is None:
                self._ranks, self._losses, lead = RowRanks(self.settings, self.row), [], WARM_STEPS
                self._ranks.ask("build")
            answers = self._ranks.ask("steps", lead, steps)
            self.rounds.append(median(map(fmean, zip(*(each["step_s"] for each in answers), strict=True))))
            self._losses += map(fmean, zip(*(each["losses"] for each in answers), strict=True))
            if is_last:
                self._finished = self._ranks.ask("finish")
        except RowFailed as failure:
            self.error = str(failure)
        if not self._keeps_ranks:
            self.end()

    def end(self) -> None:
        """End the processes."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def store(self, run: Run, alone: list[float]) -> None:
        """Store the figures, and the share of communication if the times without it are known."""
        run.error = self.error
        if run.error is None:
            run.set_times(self.rounds)
            run.losses = self._losses
            run.peak_rss_bytes = [answer["peak_rss_bytes"] for answer in self._finished]
            hashes = {answer["weights_sha256"] for answer in self._finished}
            run.weights_sha256 = hashes.pop()
            if hashes and self.row != ALONE:
                run.error = "the ranks ended with different weights"
            if alone:
                run.comm_share = max(0.0, 1 - 1 / ratio(run.step_s_rounds, alone)[0])


def foresee_settings(settings: Settings, preset: str) -> Foreseen:
    """A dry run of one preset. Raises `Untraceable`, or a ConfigError as the comparison itself would."""
    # Here, because every rank loads this package, and ranks foresee nothing.
    from shardwise.dry_run.dry_run import Scenario, dry_run
    from shardwise.dry_run.kernels import CPU, cuda

    config = Config.load(config_for(settings, preset)).for_world_size(settings.world_size)
    kernels = CPU if settings.device == "cpu" else cuda()
    return dry_run(Scenario(partial(loading.load, settings.model, "cpu"), config, settings.world_size, kernels))


def turns(steps: int) -> list[int]:
    """The timed steps of each round.

    >>> turns(10)
    [4, 4, 2]
    """
    return [min(TURN_STEPS, steps - done) for done in range(0, steps, TURN_STEPS)]


def rotated(rows: Sequence[Any], number: int) -> list[Any]:
    """The rows in another order each round, so that no row always follows the same one."""
    start = number % max(1, len(rows))
    return [*rows[start:], *rows[:start]]


def five_ways(model: str = "mlp-33m", world_size: int = 2, precision: str = "fp32", device: str = "cpu") -> Comparison:
    """Compare plain training, zero1, zero2, zero3 and CPU offload.

    `shardwise.compare.table.show` prints the result as `shardwise compare` does.
    """
    rows = [ALONE, CompareRow("zero1"), CompareRow("zero2"), CompareRow("zero3"), CompareRow("zero2_offload")]
    return compare(Settings(model, world_size, precision, device, steps=8), rows)
