"""The two phases of a comparison: observe every row in fresh processes, then time all rows in interleaved rounds.

    observe   zero0   zero1   zero2   ddp                            memory and bytes; the observers slow training down
    time      zero0 zero1 zero2 ddp | zero1 zero2 ddp zero0 | ...    a few steps per turn, so that noise hits all rows

Between turns the processes wait if the memory of all rows fits at once. Otherwise every turn starts fresh processes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, cast

import torch

from shardwise.compare.job import ALONE, CompareJob, CompareRow, Settings, config_for, interpreter
from shardwise.compare.result import Comparison, Run, mark_wrong, ratio
from shardwise.config import Config
from shardwise.errors import ConfigError
from shardwise.machine import env, launch
from shardwise.machine.local_ranks import LocalRanks
from shardwise.machine.memory import host_bytes
from shardwise.models import loading
from shardwise.partition.policy import DTYPES

TIMEOUT_S = 600.0
GRACE_S = 2.0
"""How long after a rank's failure the others may still report theirs, and how long a rank may take to exit."""
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


class RowFailed(Exception):
    """A row cannot continue. The message is what its line of the table shows."""


class RowRanks:
    """The ranks of one row in fresh processes, which run until `close`."""

    def __init__(self, settings: Settings, row: CompareRow) -> None:
        self._ranks = LocalRanks("compare", GRACE_S)
        self._connections: list[Connection] = []
        try:
            for rank in range(settings.world_size):
                self._start(CompareJob(settings, row, rank))
        except BaseException:
            self.close()
            raise

    def ask(self, verb: str, *arguments: Any) -> list[dict[str, Any]]:
        """Every rank's answer, in rank order. The first failure ends all ranks and raises `RowFailed`."""
        answers: dict[int, dict[str, Any]] = {}
        waiting: dict[Any, int] = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + TIMEOUT_S
        with contextlib.suppress(OSError):  # a rank that has exited is noticed when its answer is read
            for connection in self._connections:
                connection.send((verb, arguments))
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), left_s):
                rank = waiting.pop(ready)
                answers[rank] = self._answer(rank)
            if any("error" in answer for answer in answers.values()):
                deadline = min(deadline, time.monotonic() + GRACE_S)
        errors = [answers[rank] for rank in sorted(answers) if "error" in answers[rank]]
        if errors or waiting:
            self.close()
        if errors:
            # An exception says more than the death of a rank that lost its connections because of it.
            first = min(errors, key=lambda answer: answer.get("is_death", False))
            raise (loading.WorkloadError if first["is_input"] else RowFailed)(first["error"])
        if waiting:
            raise RowFailed(f"no answer to {verb!r} after {TIMEOUT_S:g} s")
        return [answers[rank]["value"] for rank in sorted(answers)]

    def close(self) -> None:
        """Close the pipes, on which the ranks exit, and kill what still runs after a moment."""
        for connection in self._connections:
            connection.close()
        self._ranks.close()

    def _start(self, job: CompareJob) -> None:
        ours, theirs = Pipe()
        self._connections.append(ours)
        ours.send(job)
        command = [interpreter(job.row), "-m", "shardwise.compare.worker", str(theirs.fileno())]
        self._ranks.start(command, _environment(job), pass_fds=[theirs.fileno()])
        theirs.close()

    def _answer(self, rank: int) -> dict[str, Any]:
        try:
            return cast(dict[str, Any], self._connections[rank].recv())
        except (EOFError, OSError):
            return {"error": self._ranks.describe_exit(rank, GRACE_S), "is_input": False, "is_death": True}


def _environment(job: CompareJob) -> dict[str, str]:
    settings = job.settings
    added = {
        "LOCAL_RANK": str(job.device.index or 0) if settings.device == "cuda" else str(job.rank),
        "WORLD_SIZE": str(settings.world_size),
        "LOCAL_WORLD_SIZE": str(settings.world_size),
        "MASTER_ADDR": "127.0.0.1",  # read by DeepSpeed; the ranks meet through the store
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": str(launch.threads_per_rank(settings.world_size)),
        "DS_ACCELERATOR": settings.device,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    if settings.device == "cpu":
        added |= launch.heap_environment()  # for every row, peers included
        added |= launch.matmul_environment() if settings.precision != "fp32" else {}
    return {**os.environ, **added}


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
            for number in range(len(self._turns)):
                self._time_round(timed, number)
        alone = self.comparison.alone_step_s_rounds = next((each.rounds for each in timed if each.row == ALONE), [])
        for each in timed:
            if each.row in self._runs:
                each.store(self._runs[each.row], alone)

    def _time_round(self, timed: Sequence[TimedRow], number: int) -> None:
        count = len(self._turns)
        for each in rotated(timed, number):
            if each.error is None:
                self._report(f"{each.row.name}: round {number + 1} of {count}")
                each.turn(self._turns[number], is_last=number == count - 1)

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
    from shardwise.dry_run.kernels import kernels_for

    config = Config.load(config_for(settings, preset))
    build = partial(loading.load, settings.model, "cpu")
    return dry_run(Scenario(build, config, settings.world_size, kernels_for(settings.device)))


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

    `shardwise.compare.report.show` prints the result as `shardwise compare` does.
    """
    rows = [ALONE, CompareRow("zero1"), CompareRow("zero2"), CompareRow("zero3"), CompareRow("zero2_offload")]
    return compare(Settings(model, world_size, precision, device, steps=8), rows)
