"""Figures of every step: kept on the device until they are wanted, averaged over ranks, written to files."""

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
class Row:
    """One step, over all ranks. Memory is that of the rank that has most."""

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


COLUMNS = tuple(field.name for field in dataclasses.fields(Row))


class Pending:
    """Losses and norms of steps whose values nobody has asked for yet: asking makes the host wait for the device."""

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
        """Losses, averaged over the ranks in rank order, and norms of these steps. A collective."""
        losses = comm.share(torch.stack(self._losses).double().cpu()).mean(0)
        norms = torch.stack(self._norms).double().cpu()
        self._losses, self._norms, self.rates = [], [], []
        return losses.tolist(), norms.tolist()


class Metrics:
    """The rows of a run so far, and the files they are in. Going on after `step` forgets what came later."""

    def __init__(self, folder: Path, step: int, tensorboard: bool = False) -> None:
        self._lines, self._table = folder / "metrics.jsonl", folder / "metrics.csv"
        self._board = _board(folder / "tensorboard", step) if tensorboard else None
        self.rows = [row for row in read(self._lines) if row.step <= step]
        self._lines.write_text("".join(map(_line, self.rows)))
        self._table.write_text(",".join(COLUMNS) + "\n" + "".join(map(_record, self.rows)))

    def add(self, rows: list[Row]) -> None:
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


def read(path: Path) -> list[Row]:
    """The rows of a file of JSON lines; a last line that was cut off by a crash is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            rows.append(Row(**json.loads(line)))
        except (ValueError, TypeError):
            break
    return rows


def check_tensorboard() -> Any:
    """TensorBoard's writer, or one clear message."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError("--tensorboard needs the package: pip install tensorboard") from None
    return SummaryWriter


def _board(folder: Path, step: int) -> Any:
    return check_tensorboard()(str(folder), purge_step=step + 1)


def _line(row: Row) -> str:
    return json.dumps(dataclasses.asdict(row)) + "\n"


def _record(row: Row) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow("" if v is None else v for v in dataclasses.astuple(row))
    return text.getvalue()
