"""The part of a tensor that one rank of a tensor-parallel group holds. Integers only.

    tensor of shape (4, 6), cut along dimension 1 into 2:     | 0 0 0 | 1 1 1 |
                                                              | 0 0 0 | 1 1 1 |
    part 1: shape (4, 3), columns 3 to 6                      | 0 0 0 | 1 1 1 |
                                                              | 0 0 0 | 1 1 1 |

Parts are those of `torch.chunk`: equal, except that the last ones may be smaller or empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Part `index` of `count` of a tensor with `shape`, cut along `dim`; if `dim` is None, each part is the whole.

    >>> part = TensorPart((4, 6), 1, 2, 1)
    >>> part.offset, part.size, part.local_shape
    (3, 3, (4, 3))
    """

    shape: tuple[int, ...]
    dim: int | None = None
    count: int = 1
    index: int = 0

    @property
    def is_counted(self) -> bool:
        """Whether this rank's elements count in a sum over the group: of equal ones, those of the first rank do."""
        return self.dim is not None or self.index == 0

    @property
    def offset(self) -> int:
        """The first index along `dim`."""
        return min(self.index * self._step, self._length)

    @property
    def size(self) -> int:
        """The length along `dim`."""
        return min(self._step, self._length - self.offset)

    @property
    def local_shape(self) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.size, *self.shape[self.dim + 1 :])

    @property
    def start(self) -> int:
        """The elements of all parts before this one, laid end to end."""
        if self.dim is None:
            return 0
        return self.offset * math.prod(self.shape[: self.dim]) * math.prod(self.shape[self.dim + 1 :])

    @property
    def stored_cut(self) -> tuple[int, int] | None:
        """(`dim`, `count`) if parts laid end to end are in another order than the tensor's elements, else None.

        >>> TensorPart((4, 6), 0, 2, 1).stored_cut, TensorPart((4, 6), 1, 2, 1).stored_cut
        (None, (1, 2))
        """
        return (self.dim, self.count) if self.dim and self.count > 1 and math.prod(self.shape[: self.dim]) > 1 else None

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Elements of the part in runs that are contiguous in the whole tensor too: start and stop of each run, and
        where it starts in the tensor.

        >>> list(TensorPart((4, 6), 1, 2, 1).runs(2, 7))
        [(2, 3, 5), (3, 6, 9), (6, 7, 15)]
        """
        if self.stored_cut is None:
            yield start, stop, start + self.start
            return
        dim = self.dim or 0
        inner = math.prod(self.shape[dim + 1 :])
        run, row, before = self.size * inner, self.shape[dim] * inner, self.offset * inner
        while start < stop:
            outer, inside = divmod(start, run)
            end = min((outer + 1) * run, stop)
            yield start, end, outer * row + before + inside
            start = end

    @property
    def _length(self) -> int:
        return self.shape[self.dim] if self.dim is not None else 0

    @property
    def _step(self) -> int:
        return -(-self._length // self.count)
