"""The metrics of every step, and their files."""

from __future__ import annotations

import csv
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


class MetricsFiles:
    """The metrics of a run so far, and their files. Continuing after `step` drops later rows."""

    def __init__(self, folder: Path, step: int, tensorboard: bool = False) -> None:
        self._lines, self._table = folder / "metrics.jsonl", folder / "metrics.csv"
        self._board = None
        self.rows: list[StepMetrics] = []
        kept = [row for row in read(self._lines) if row.step <= step]
        self._lines.write_text("")
        self._table.write_text(",".join(COLUMNS) + "\n")
        self.add(kept)
        if tensorboard:
            self._board = check_tensorboard()(str(folder / "tensorboard"), purge_step=step + 1)

    def add(self, rows: list[StepMetrics]) -> None:
        self.rows += rows
        with self._lines.open("a") as lines, self._table.open("a", newline="") as table:
            lines.writelines(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows)
            csv.writer(table, lineterminator="\n").writerows(map(dataclasses.astuple, rows))
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
