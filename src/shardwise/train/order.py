"""Which sample comes when: a permutation for every epoch, computed and not stored.

All ranks see one endless stream of samples: epoch 0 in its order, then epoch 1 in another, and so on. A step takes the
next `batch` of them, whatever the number of ranks; where training stands is one integer, the samples taken so far.

    stream   | epoch 0 ............................ | epoch 1 ...
    steps    |  0  |  1  |  2  | ...
    ranks    |0 1 2|0 1 2|                each takes its rows of a micro-batch

The permutation is a Feistel network on the bits of the index: any place of any epoch costs the same, no memory, and no
state but the seed. Numbers that fall outside the range are sent through again until they are inside.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

_ROUNDS = 6
_WORD = (1 << 64) - 1


def samples_at(positions: Indices, count: int, seed: int) -> Indices:
    """The samples, out of `count`, at these places of the stream.

    >>> sorted(samples_at(np.arange(5), 5, seed=0).tolist())
    [0, 1, 2, 3, 4]
    """
    epochs, places = np.divmod(positions, count)
    samples = np.empty_like(places)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        samples[chosen] = _permute(places[chosen], count, _mix(_mix(seed) ^ int(epoch)))
    return samples


@dataclass(frozen=True)
class Share:
    """A rank's rows of every step: `batch` samples over all ranks, in `accumulation` micro-batches."""

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
        """Places of the stream for this rank in a micro-batch of the step that begins after `taken` samples.

        >>> [Share(8, 2, rank, 2).positions(100, 1).tolist() for rank in (0, 1)]
        [[104, 105], [106, 107]]
        """
        first = taken + (micro * self.world_size + self.rank) * self.micro_batch
        return np.arange(first, first + self.micro_batch, dtype=np.int64)


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
    """A number that looks nothing like `value` (the finaliser of splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)
