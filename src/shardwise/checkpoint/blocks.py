"""Files whose content is checksummed in blocks: written once from front to back, read anywhere.

A reader that needs a part of a file verifies just the blocks that this part touches. The checksum is CRC-32, which
finds every single flipped bit and every burst of up to 32; it guards against accidents, not against forgery.
"""

from __future__ import annotations

import os
import zlib
from collections import OrderedDict
from pathlib import Path
from types import TracebackType
from typing import Self

from shardwise.errors import DamagedError

BLOCK_BYTES = 1 << 20
_CACHED_BLOCKS = 8
"""Small tensors lie side by side: the blocks they share are read and verified once."""


class BlockWriter:
    """Writes a file and keeps a checksum of every block. Leaving it without an error makes the bytes durable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size_bytes = 0
        self.checksums: list[int] = []
        self._file = path.open("xb", buffering=0)

    def write(self, data: memoryview) -> None:
        """Append bytes."""
        position = 0
        while position < len(data):
            room = BLOCK_BYTES - self.size_bytes % BLOCK_BYTES
            part = data[position : position + room]
            if room == BLOCK_BYTES:
                self.checksums.append(0)
            self.checksums[-1] = zlib.crc32(part, self.checksums[-1])
            self._write_all(part)
            self.size_bytes += len(part)
            position += len(part)

    def _write_all(self, data: memoryview) -> None:
        while data:
            data = data[self._file.write(data) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


class BlockReader:
    """Reads parts of a file, each block that they touch verified."""

    def __init__(self, path: Path, size_bytes: int, checksums: list[int]) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self._checksums = checksums
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._descriptor = _open(path)
        seen = os.fstat(self._descriptor).st_size
        if seen != size_bytes:
            os.close(self._descriptor)
            raise DamagedError(f"{path} is damaged: it has {seen} bytes, and {size_bytes} were written")

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` with the bytes from `offset` on."""
        position = 0
        while position < len(target):
            number, start = divmod(offset + position, BLOCK_BYTES)
            part = memoryview(self._block(number))[start : start + len(target) - position]
            target[position : position + len(part)] = part
            position += len(part)

    def verify(self) -> None:
        """Read everything."""
        for number in range(len(self._checksums)):
            self._block(number)

    def close(self) -> None:
        os.close(self._descriptor)

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            start = number * BLOCK_BYTES
            data = _read_at(self._descriptor, start, min(BLOCK_BYTES, self.size_bytes - start))
            if zlib.crc32(data) != self._checksums[number]:
                stop = start + len(data)
                raise DamagedError(
                    f"{self.path} is damaged: its bytes {start} to {stop} are not those that were written"
                )
            self._blocks[number] = data
            if len(self._blocks) > _CACHED_BLOCKS:
                self._blocks.popitem(last=False)
        return self._blocks[number]


def _open(path: Path) -> int:
    """A link could lead out of the folder: it is not followed."""
    try:
        return os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from None


def _read_at(descriptor: int, offset: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.pread(descriptor, size, offset)
        if not part:
            break
        parts.append(part)
        offset, size = offset + len(part), size - len(part)
    return b"".join(parts)
