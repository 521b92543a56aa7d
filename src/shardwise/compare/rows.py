"""The rows of a comparison: presets of shardwise, and peers with the interpreter that has them."""

from __future__ import annotations

import difflib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.config.presets import PRESETS
from shardwise.errors import ConfigError

DEFAULT_PRESETS = ("zero0", "zero1", "zero2", "zero3")
# The preset of ours that a peer corresponds to.
PEERS: dict[str, tuple[str, ...]] = {"ddp": ("zero0",), "fsdp2": ("zero3",), "deepspeed": ("zero1", "zero2", "zero3")}
DEEPSPEED_HINT = (
    "DeepSpeed is not installed: run `make bench-env` in a checkout of shardwise, or name an interpreter that has it "
    "in SHARDWISE_BENCH_PYTHON"
)


@dataclass(frozen=True)
class Row:
    """One way to train. Without a peer it is a preset of ours; with one, the preset it corresponds to."""

    preset: str
    peer: str | None = None

    @property
    def name(self) -> str:
        several = self.peer is not None and len(PEERS.get(self.peer, ())) > 1
        return f"{self.peer} {self.preset}" if several else self.peer or self.preset


ALONE = Row("zero0", "alone")
"""Every rank by itself, without any communication: the yardstick of what communication costs. Never a result."""


def parse_rows(presets: str, peers: str) -> list[Row]:
    """The rows that two comma-separated lists name.

    >>> [row.name for row in parse_rows("zero0,zero3", "ddp,deepspeed-zero3")]
    ['zero0', 'zero3', 'ddp', 'deepspeed zero3']
    """
    rows = [Row(_known(name, list(PRESETS), "preset")) for name in _names(presets)]
    choices = [*PEERS, *(f"deepspeed-{preset}" for preset in PEERS["deepspeed"])]
    for name in _names(peers):
        peer, _, preset = _known(name, choices, "peer").partition("-")
        rows += [Row(each, peer) for each in ([preset] if preset else PEERS[peer])]
    if not rows:
        raise ConfigError("nothing to compare: name at least one preset or peer")
    return list(dict.fromkeys(rows))


def interpreter(row: Row) -> str:
    """The Python that can run `row`; a ConfigError that says how to get it when none can."""
    if row.peer != "deepspeed" or importlib.util.find_spec("deepspeed") is not None:
        return sys.executable
    for python in _candidates():
        if _has_deepspeed(python):
            return str(python)
    raise ConfigError(DEEPSPEED_HINT)


def _candidates() -> Sequence[Path]:
    named = os.environ.get("SHARDWISE_BENCH_PYTHON")
    if named:
        return [Path(named)]
    checkout = Path(__file__).parents[3]
    return [folder / ".bench-env" / "bin" / "python" for folder in (Path.cwd(), checkout)]


def _has_deepspeed(python: Path) -> bool:
    if not python.exists():
        return False
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('deepspeed') is None)"
    return subprocess.run([python, "-c", look], capture_output=True).returncode == 0


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _known(name: str, choices: Sequence[str], what: str) -> str:
    if name in choices:
        return name
    nearest = difflib.get_close_matches(name, choices, n=1)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    raise ConfigError(f"unknown {what} {name!r}{hint}: choose from {', '.join(choices)}")
