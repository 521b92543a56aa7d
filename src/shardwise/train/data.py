"""Which samples a rank trains on, and when: pure integers; the loop makes tensors of them.

The corpus is cut into windows of one context each, the last of which are held out for validation. All ranks read one
endless stream of samples: epoch 0 in its order, then epoch 1 in another, and so on. A step uses the next `batch` of
them, whatever the number of ranks, so the position of training is one integer: the samples used so far.

    stream   | epoch 0 ............................ | epoch 1 ...
    steps    |  0  |  1  |  2  | ...
    ranks    |0 1 2|0 1 2|                each reads its rows of a micro-batch

Each epoch has its own permutation, a Feistel network on the bits of the index: looking up any position of any epoch
costs the same, needs no memory, and depends on the seed alone. Results outside the range go through the network again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.errors import ConfigError
from shardwise.sizes import format_count
from shardwise.train.corpus import Corpus

Indices = npt.NDArray[np.int64]

_ROUNDS = 6
_WORD = (1 << 64) - 1


def samples_at(positions: Indices, count: int, seed: int) -> Indices:
    """The samples, out of `count`, at these positions of the stream.

    >>> sorted(samples_at(np.arange(5), 5, seed=0).tolist())
    [0, 1, 2, 3, 4]
    """
    epochs, offsets = np.divmod(positions, count)
    samples = np.empty_like(offsets)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        samples[chosen] = _permute(offsets[chosen], count, _mix(_mix(seed) ^ int(epoch)))
    return samples


@dataclass(frozen=True)
class BatchShare:
    """A rank's rows of every step. A step has `batch` samples over all ranks, in `accumulation` micro-batches."""

    batch: int
    accumulation: int
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        assert self.batch % (self.accumulation * self.world_size) == 0

    @property
    def micro_batch(self) -> int:
        """Samples of this rank in one micro-batch."""
        return self.batch // (self.accumulation * self.world_size)

    def positions(self, taken: int, micro: int) -> Indices:
        """Positions in the stream of this rank's part of a micro-batch, in the step that follows `taken` samples.

        >>> [BatchShare(8, 2, rank, 2).positions(100, 1).tolist() for rank in (0, 1)]
        [[104, 105], [106, 107]]
        """
        first = taken + (micro * self.world_size + self.rank) * self.micro_batch
        return np.arange(first, first + self.micro_batch, dtype=np.int64)


@dataclass(frozen=True)
class Windows:
    """Adjacent samples of a corpus, starting at token `first`. Each has one more token than the context: a target."""

    corpus: Corpus
    first: int
    count: int
    context: int

    def read(self, samples: Indices) -> Indices:
        """The samples as rows of context + 1 tokens."""
        starts = self.first + samples * self.context
        return np.stack([self.corpus.read(start, start + self.context + 1) for start in starts.tolist()])


def split(corpus: Corpus, context: int, held_out: float) -> tuple[Windows, Windows]:
    """Windows for training and, from the end of the corpus, windows for validation; at least one of each."""
    windows = (corpus.length - 1) // context
    if windows < 2:
        raise ConfigError(
            f"the corpus has {format_count(corpus.length)} token(s), and at least {2 * context + 1} are needed with a "
            f"context of {context}: give more text, or a smaller --context"
        )
    validation = min(windows - 1, max(1, round(windows * held_out)))
    trained = windows - validation
    return Windows(corpus, 0, trained, context), Windows(corpus, trained * context, validation, context)


@dataclass
class SampleLoader:
    """A rank's batches. Its only state is `taken`, the number of samples that all ranks have used so far."""

    windows: Windows
    share: BatchShare
    seed: int
    taken: int = 0

    @property
    def epoch(self) -> float:
        """How many times the corpus has been used."""
        return self.taken / self.windows.count

    def step(self) -> Iterator[Indices]:
        """The micro-batches of one step. `taken` advances only after the last one."""
        for micro in range(self.share.accumulation):
            positions = self.share.positions(self.taken, micro)
            yield self.windows.read(samples_at(positions, self.windows.count, self.seed))
        self.taken += self.share.batch


def validation_batches(windows: Windows, samples: int, share: BatchShare) -> Iterator[Indices]:
    """A rank's part of about `samples` evenly spread windows, the same every time. Every rank has as many batches."""
    wanted = min(samples, windows.count)
    per_rank = -(-wanted // share.world_size)
    numbers = (np.arange(per_rank, dtype=np.int64) * share.world_size + share.rank) % wanted
    chosen = numbers * windows.count // wanted
    for first in range(0, per_rank, share.micro_batch):
        yield windows.read(chosen[first : first + share.micro_batch])


def _permute(indices: Indices, count: int, key: int) -> Indices:
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    keys = [np.uint64(_mix(key ^ _mix(number))) for number in range(_ROUNDS)]
    values = _feistel(indices.astype(np.uint64), half, keys)
    while (outside := values >= np.uint64(count)).any():
        values[outside] = _feistel(values[outside], half, keys)
    return values.astype(np.int64)


def _feistel(values: npt.NDArray[np.uint64], half: int, keys: list[np.uint64]) -> npt.NDArray[np.uint64]:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        mixed = (right ^ key) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
        left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(32))) & mask)
    return (left << shift) | right


def _mix(value: int) -> int:
    """A pseudo-random number from `value` (the finaliser of splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)
