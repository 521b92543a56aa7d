"""From a corpus to batches: windows of one context each, held-out ones at the end, and a rank's loader.

Integers only, as in `order`; tensors are made of them in the loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardwise.errors import ConfigError
from shardwise.sizes import format_count
from shardwise.train.corpus import Corpus
from shardwise.train.order import Indices, Share, samples_at


@dataclass(frozen=True)
class Windows:
    """Samples cut from a corpus side by side, from token `first` on; each has one token more, to be predicted."""

    corpus: Corpus
    first: int
    count: int
    context: int

    def read(self, samples: Indices) -> Indices:
        """The samples as rows of context + 1 tokens."""
        starts = self.first + samples * self.context
        return np.stack([self.corpus.read(start, start + self.context + 1) for start in starts.tolist()])


def split(corpus: Corpus, context: int, held_out: float) -> tuple[Windows, Windows]:
    """Windows to train on and, from the end of the corpus, windows to validate with; at least one of each."""
    windows = (corpus.length - 1) // context
    if windows < 2:
        raise ConfigError(
            f"the corpus has {format_count(corpus.length)} token(s), and at least {2 * context + 1} are needed with a "
            f"context of {context}: give more text, or a smaller --context"
        )
    validation = min(windows - 1, max(1, round(windows * held_out)))
    trained = windows - validation
    return Windows(corpus, 0, trained, context), Windows(corpus, trained * context, validation, context)


class Loader:
    """A rank's batches. `taken`, the samples that all ranks took so far, is the whole of its state."""

    def __init__(self, windows: Windows, share: Share, seed: int) -> None:
        self.windows = windows
        self.share = share
        self.seed = seed
        self.taken = 0

    @property
    def epoch(self) -> float:
        """How often the corpus was seen."""
        return self.taken / self.windows.count

    def step(self) -> Iterator[Indices]:
        """The micro-batches of one step. Only when the last one is done, the step counts as taken."""
        for micro in range(self.share.accumulation):
            places = self.share.positions(self.taken, micro)
            yield self.windows.read(samples_at(places, self.windows.count, self.seed))
        self.taken += self.share.batch


def validation_batches(windows: Windows, samples: int, share: Share) -> Iterator[Indices]:
    """A rank's part of about `samples` windows, evenly spread, as many batches on every rank; the same each time."""
    wanted = min(samples, windows.count)
    per_rank = -(-wanted // share.world_size)
    places = (np.arange(per_rank, dtype=np.int64) * share.world_size + share.rank) % wanted
    chosen = places * windows.count // wanted
    for first in range(0, per_rank, share.micro_batch):
        yield windows.read(chosen[first : first + share.micro_batch])
