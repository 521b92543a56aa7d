"""The metrics of every step: collected on the device, averaged over the ranks when needed, written to files."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.comm.comm import Comm
from shardwise.errors import ConfigError


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


COLUMNS = tuple(field.name for field in dataclasses.fields(StepMetrics))


class PendingMetrics:
    """Losses and norms of recent steps, still on the device: reading them makes the host wait for it."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._norms: list[torch.Tensor] = []
        self.rates: list[float] = []

    def __len__(self) -> int:
        return len(self.rates)

    def add(self, loss: torch.Tensor, norm: torch.Tensor, rate: float) -> None:
        self._losses.append(loss)
        self._norms.append(norm)
        self.rates.append(rate)

    def take(self, comm: Comm) -> tuple[list[float], list[float]]:
        """Read and clear: the losses, averaged over the ranks in rank order, and the norms. A collective."""
        losses = comm.share(torch.stack(self._losses).double().cpu()).mean(0)
        norms = torch.stack(self._norms).double().cpu()
        self._losses, self._norms, self.rates = [], [], []
        return losses.tolist(), norms.tolist()


class MetricsFiles:
    """The metrics of a run so far, and their files. Continuing after `step` drops later rows."""

    def __init__(self, folder: Path, step: int, tensorboard: bool = False) -> None:
        self._lines, self._table = folder / "metrics.jsonl", folder / "metrics.csv"
        self._board = _board(folder / "tensorboard", step) if tensorboard else None
        self.rows = [row for row in read(self._lines) if row.step <= step]
        self._lines.write_text("".join(map(_line, self.rows)))
        self._table.write_text(",".join(COLUMNS) + "\n" + "".join(map(_record, self.rows)))

    def add(self, rows: list[StepMetrics]) -> None:
        self.rows += rows
        for path, form in ((self._lines, _line), (self._table, _record)):
            with path.open("a") as file:
                file.write("".join(map(form, rows)))
        if self._board is not None:
            for row in rows:
                for name in ("loss", "val_loss", "lr", "grad_norm", "tokens_per_s", "memory_bytes", "peak_bytes"):
                    if (value := getattr(row, name)) is not None:
                        self._board.add_scalar(name, value, row.step)
            self._board.flush()


def read(path: Path) -> list[StepMetrics]:
    """The rows of a file of JSON lines, without a last line that a crash cut off."""
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            rows.append(StepMetrics(**json.loads(line)))
        except (ValueError, TypeError):
            break
    return rows


def check_tensorboard() -> Any:
    """TensorBoard's writer class. Raises a ConfigError if the package is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError("--tensorboard needs the package: pip install tensorboard") from None
    return SummaryWriter


def _board(folder: Path, step: int) -> Any:
    return check_tensorboard()(str(folder), purge_step=step + 1)


def _line(row: StepMetrics) -> str:
    return json.dumps(dataclasses.asdict(row)) + "\n"


def _record(row: StepMetrics) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow("" if v is None else v for v in dataclasses.astuple(row))
    return text.getvalue()
