"""What a comparison runs: its settings, its rows (presets of shardwise and peers), and the job of one process.

A row of a peer may need another interpreter, one that has the peer installed.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from shardwise.config.presets import PRESETS
from shardwise.errors import ConfigError
from shardwise.partition.policy import DTYPES

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01
SEED = 17
PEERS: dict[str, tuple[str, ...]] = {"ddp": ("zero0",), "fsdp2": ("zero3",), "deepspeed": ("zero1", "zero2", "zero3")}
"""The peers, each with the presets it corresponds to."""


@dataclass(frozen=True)
class Settings:
    """What is the same for every row."""

    model: str
    world_size: int = 2
    precision: str = "fp32"
    device: str = "cpu"
    accumulate: int = 1
    clip_norm: float | None = 1.0
    deterministic: bool = False
    steps: int = 20


def config_for(settings: Settings, preset: str) -> dict[str, object]:
    """The configuration of a preset's row."""
    return {
        "preset": preset,
        "precision": {"compute": settings.precision},
        "batch": {"accumulation": settings.accumulate},
        "gradients": {"clip_norm": settings.clip_norm, "deterministic": settings.deterministic},
    }


def peer_settings(name: str) -> dict[str, Any]:
    """The settings file of a peer, from the folder `settings`."""
    return cast(dict[str, Any], json.loads((Path(__file__).parent / "settings" / f"{name}.json").read_text()))


@dataclass(frozen=True)
class CompareRow:
    """One way to train: a preset of shardwise or, with `peer`, another system and the preset it corresponds to."""

    preset: str
    peer: str | None = None

    @property
    def name(self) -> str:
        several = self.peer is not None and len(PEERS.get(self.peer, ())) > 1
        return f"{self.peer} {self.preset}" if several else self.peer or self.preset


ALONE = CompareRow("zero0", "alone")
"""Every rank trains by itself, without communication. It is the reference for the cost of communication."""


@dataclass(frozen=True)
class CompareJob:
    """One rank of one row."""

    settings: Settings
    row: CompareRow
    rank: int

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.settings.precision]

    @property
    def device(self) -> torch.device:
        """The device of this rank. The ranks share the GPUs: rank r computes on GPU r modulo their number."""
        if self.settings.device == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", self.rank % torch.cuda.device_count())


def parse_rows(presets: str, peers: str) -> list[CompareRow]:
    """The rows that two comma-separated lists name.

    >>> [row.name for row in parse_rows("zero0,zero3", "ddp,deepspeed-zero3")]
    ['zero0', 'zero3', 'ddp', 'deepspeed zero3']
    """
    rows = [CompareRow(name) for name in _named(presets, list(PRESETS), "preset")]
    choices = [*PEERS, *(f"deepspeed-{preset}" for preset in PEERS["deepspeed"])]
    for name in _named(peers, choices, "peer"):
        peer, _, preset = name.partition("-")
        rows += [CompareRow(each, peer) for each in ([preset] if preset else PEERS[peer])]
    if not rows:
        raise ConfigError("nothing to compare: name at least one preset or peer")
    return list(dict.fromkeys(rows))


def interpreter(row: CompareRow) -> str:
    """The Python that can run `row`. Raises a ConfigError that says how to get one if there is none."""
    if row.peer != "deepspeed" or importlib.util.find_spec("deepspeed") is not None:
        return sys.executable
    checkout = Path(__file__).parents[3]
    candidates = [folder / ".bench-env" / "bin" / "python" for folder in (Path.cwd(), checkout)]
    if named := os.environ.get("SHARDWISE_BENCH_PYTHON"):
        candidates = [Path(named)]
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('deepspeed') is None)"
    for python in candidates:
        if python.exists() and subprocess.run([python, "-c", look], capture_output=True).returncode == 0:
            return str(python)
    raise ConfigError(
        "DeepSpeed is not installed: run `make bench-env` in a checkout of shardwise, or name an interpreter that has "
        "it in SHARDWISE_BENCH_PYTHON"
    )


def _named(text: str, choices: Sequence[str], what: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in choices:
            hint = "".join(f" (did you mean {near!r}?)" for near in difflib.get_close_matches(name, choices, n=1))
            raise ConfigError(f"unknown {what} {name!r}{hint}: choose from {', '.join(choices)}")
    return names
