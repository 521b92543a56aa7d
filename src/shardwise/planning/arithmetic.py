"""The arithmetic that everyone knows ZeRO by: bytes of model states per rank, elements on the wire. Integers only.

Ψ parameters, W ranks, K micro-batches per step. An accounting says how many bytes each kind takes per parameter:

| accounting  | weights | grads | master | moments | in all |
|-------------|---------|-------|--------|---------|--------|
| `full`      | 2       | 2     | 4      | 8       | 16     |
| `no-master` | 2       | 2     | 0      | 8       | 12     |
| `fp32`      | 4       | 4     | 0      | 8       | 16     |

These are the textbook's states. The engine holds less under zero3: the 16-bit weights are cast from the fp32 master
when they are gathered, so that 14Ψ/W rest instead of 16Ψ/W.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from shardwise.config.costs import rank_share, sent, wire_times
from shardwise.config.presets import PRESETS
from shardwise.errors import ConfigError

STAGES = ("zero0", "zero1", "zero2", "zero3")


class Accounting(NamedTuple):
    """Bytes per parameter."""

    weights: int
    grads: int
    master: int
    moments: int

    @property
    def optim(self) -> int:
        return self.master + self.moments


ACCOUNTINGS = {
    "full": Accounting(2, 2, 4, 8),
    "no-master": Accounting(2, 2, 0, 8),
    "fp32": Accounting(4, 4, 0, 8),
}


def accounting(name: str) -> Accounting:
    """An accounting by name."""
    if name not in ACCOUNTINGS:
        raise ConfigError(f"unknown accounting {name!r}: choose from {', '.join(ACCOUNTINGS)}")
    return ACCOUNTINGS[name]


def state_bytes(preset: str, parameters: int, world_size: int, each: Accounting) -> dict[str, Fraction]:
    """Model states of a rank by kind, exactly.

    >>> {kind: float(size) / 1e9 for kind, size in state_bytes("zero1", 8 * 10**9, 5, ACCOUNTINGS["no-master"]).items()}
    {'weights': 16.0, 'grads': 16.0, 'optim': 12.8}
    """
    placement = PRESETS[preset]
    return {kind: parameters * getattr(each, kind) * rank_share(own.sharding, world_size) for kind, own in placement}


def total_bytes(preset: str, parameters: int, world_size: int, each: Accounting) -> Fraction:
    """Model states of a rank.

    >>> float(total_bytes("zero3", 130 * 10**9, 128, ACCOUNTINGS["full"]) / 10**9)
    16.25
    """
    return sum(state_bytes(preset, parameters, world_size, each).values(), Fraction(0))


def saving(preset: str, world_size: int, each: Accounting) -> Fraction:
    """How many times less a rank holds than under zero0.

    >>> float(saving("zero1", 10**9, ACCOUNTINGS["full"])) > 3.99
    True
    """
    return total_bytes("zero0", 1, world_size, each) / total_bytes(preset, 1, world_size, each)


def wire_elements(preset: str, trainable: int, frozen: int, world_size: int, accumulation: int) -> int:
    """Elements that a rank sends per step, at most: contract C3."""
    times = wire_times(PRESETS[preset], accumulation)
    return sent(sum(times) * trainable + times.gathers * frozen, world_size)
