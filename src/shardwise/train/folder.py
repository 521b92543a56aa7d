"""The output folder of a run: its files, which run it contains, whether that run is finished, and its metrics."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from shardwise.checks import check_output_folder
from shardwise.errors import ConfigError, DiskError
from shardwise.files import parse_json, read_json, validated, writing

Count = Annotated[int, Field(strict=True, ge=0)]
REMEDY = "--fresh starts over"
ON_BOARD = ("loss", "val_loss", "lr", "grad_norm", "tokens_per_s", "memory_bytes", "peak_bytes")
"""The metrics that TensorBoard shows."""


class RunIdentity(BaseModel):
    """What a run must match to be continued: the model, and the data with its order."""

    model: dict[str, Any]
    data: dict[str, Any]


class TrainPosition(BaseModel):
    """The position of a run in a checkpoint: steps, samples that all ranks have used, seconds, and which run it is."""

    step: Count
    taken: Count
    elapsed_s: float = Field(ge=0)
    identity: RunIdentity


class RunRecord(BaseModel):
    """The record of the run in a folder: which run it is, where it began, its steps once it is finished."""

    identity: RunIdentity | None = None
    resume: str | None = None
    finished_steps: Count = 0


class RunFolder:
    """The folder of a run. Only rank 0 writes to it, except for checkpoints and the export."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.checkpoints = root / "checkpoints"
        self.export = root / "export"
        self.plot = root / "plot.png"
        self.sample = root / "sample.txt"
        self.report = root / "report.txt"
        self.record = root / "run.json"  # the run's identity and, once it is finished, the number of its steps

    def error(self, rank: int) -> Path:
        """The traceback of a rank that failed."""
        return self.root / f"error-rank{rank}.txt"

    def open(self) -> None:
        """Create the folder and check that it is writable."""
        check_output_folder("--out", self.root)

    def clear(self) -> None:
        """Remove the files of earlier runs, and no others."""
        if not self.record.is_file():
            return
        for path in (self.checkpoints, self.export, self.root / "tensorboard"):
            shutil.rmtree(path, ignore_errors=True)
        found = [*self.root.glob("metrics.*"), *self.root.glob("error-rank*.txt")]
        for path in (self.plot, self.sample, self.report, *found, self.record):
            path.unlink(missing_ok=True)

    @property
    def has_checkpoint(self) -> bool:
        return any(self.checkpoints.glob("[!.]*/manifest.json"))

    def finished_steps(self) -> int:
        """The steps of the finished run in this folder; 0 if there is none."""
        return self._read().finished_steps

    def check(self, identity: dict[str, Any], resume: Path | None = None) -> None:
        """Raise a ConfigError if the folder contains a run of another model or other data, or with another --resume."""
        found = self._read()
        if found.identity is None or not self.has_checkpoint:
            return
        check_identity(found.identity, identity, str(self.root))
        if resume is not None and _absolute(resume) not in (found.resume, _absolute(self.checkpoints)):
            raise ConfigError(
                f"--resume {resume}: {self.root} has checkpoints of its own, which would be used instead: "
                "start over with --fresh, or give another --out"
            )

    def write_record(self, identity: dict[str, Any], resume: Path | None = None, finished_steps: int = 0) -> None:
        """Write the record. It contains `resume`, so that the same command continues instead of starting again."""
        source = _absolute(resume) if resume is not None else self._read().resume
        text = json.dumps({"identity": identity, "resume": source, "finished_steps": finished_steps}, indent=1)
        new = self.record.with_suffix(".new")
        with writing(self.record, DiskError, len(text)):
            new.write_text(text)
            os.replace(new, self.record)

    def write(self, path: Path, text: str) -> None:
        """Write a file of the run; a DiskError names it if it cannot be written."""
        with writing(path, DiskError, len(text)):
            path.write_text(text, encoding="utf-8")

    def _read(self) -> RunRecord:
        try:
            return read_json(self.record, RunRecord, ConfigError, REMEDY)
        except FileNotFoundError:
            return RunRecord()


def check_resume(source: Path | None) -> None:
    """Raise a ConfigError if there is no checkpoint to resume from."""
    if source is not None and not any((*source.glob("manifest.json"), *source.glob("[!.]*/manifest.json"))):
        raise ConfigError(f"--resume {source}: there is no checkpoint: name the folder `checkpoints` of another run")


def _absolute(path: Path) -> str:
    return str(path.absolute())


def check_identity(found: RunIdentity, wanted: dict[str, Any], where: str) -> None:
    """Raise a ConfigError that names what differs: a dimension of the model, the data, or the seed."""
    advice = "give another --out, or start over with --fresh"
    for key, value in wanted["model"].items():
        if (there := found.model.get(key)) != value:
            raise ConfigError(f"{where} holds a run of another model ({key} is {there} there, {value} now): {advice}")
    for key, value in wanted["data"].items():
        if (there := found.data.get(key)) != value:
            what = "on other data" if key == "fingerprint" else f"with another {key} ({there} there, {value} now)"
            raise ConfigError(f"{where} holds a run {what}: {advice}")


@dataclass(frozen=True)
class StepMetrics:
    """One step, over all ranks. Memory is that of the rank that uses most."""

    step: int
    tokens: int
    loss: float
    val_loss: float | None
    lr: float
    grad_norm: float
    tokens_per_s: float
    memory_bytes: int
    peak_bytes: int
    time_s: float


class MetricsFiles:
    """The files of a run's metrics. Continuing after `step` drops later rows. Nothing of a step stays in memory."""

    def __init__(self, folder: Path, step: int, tensorboard: bool = False) -> None:
        self._lines, self._table = folder / "metrics.jsonl", folder / "metrics.csv"
        self._board = None
        kept = [row for row in read(self._lines) if row.step <= step]
        with writing(folder, DiskError):
            self._lines.write_text("")
            self._table.write_text(",".join(field.name for field in dataclasses.fields(StepMetrics)) + "\n")
        self.add(kept)
        if tensorboard:
            self._board = check_tensorboard()(str(folder / "tensorboard"), purge_step=step + 1)

    @property
    def rows(self) -> list[StepMetrics]:
        """All rows so far, read from the file."""
        return read(self._lines)

    def add(self, rows: list[StepMetrics]) -> None:
        with writing(self._lines, DiskError), self._lines.open("a") as lines:
            lines.writelines(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows)
        with writing(self._table, DiskError), self._table.open("a", newline="") as table:
            csv.writer(table, lineterminator="\n").writerows(map(dataclasses.astuple, rows))
        if self._board is not None:
            for row, name in itertools.product(rows, ON_BOARD):
                if (value := getattr(row, name)) is not None:
                    self._board.add_scalar(name, value, row.step)
            self._board.flush()


def read(path: Path) -> list[StepMetrics]:
    """The rows of a file of JSON lines, up to the first that is none, such as a last line that a crash cut off."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            found = parse_json(line, str(path), ConfigError, REMEDY)
            rows.append(validated(StepMetrics, found, str(path), ConfigError, REMEDY))
        except ConfigError:
            break
    return rows


def check_tensorboard() -> Any:
    """TensorBoard's writer class. Raises a ConfigError if the package is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError("--tensorboard needs the package: pip install tensorboard") from None
    return SummaryWriter
