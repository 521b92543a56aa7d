"""Tensors in safetensors files: written once from front to back, read anywhere, a few MB at a time.

Contents are checksummed in blocks of 1 MiB, so a reader of a part verifies only the blocks that the part touches. The
checksum is CRC-32, which finds every flipped bit and every burst of up to 32 bits. It guards against accidents, not
against forgery.
"""

from __future__ import annotations

import contextlib
import json
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from pydantic import BaseModel

from shardwise.checkpoint.manifest import BLOCK_BYTES, Manifest, StoredTensor, pieces_over
from shardwise.checkpoint.object_store import storage_of
from shardwise.checkpoint.plain import REMEDY
from shardwise.checkpoint.storage import Location
from shardwise.errors import CheckpointError, DamagedError
from shardwise.files import parse_json, validated
from shardwise.offload.safetensors_header import DTYPES
from shardwise.partition.layout import Span
from shardwise.partition.part import TensorPart

CHUNK_BYTES = 4 << 20
_CACHED_BLOCKS = 8
"""Small tensors lie side by side: the blocks they share are read and verified once."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorSlice:
    """A range of a tensor's flat elements to write; `read` returns any part of the range, counted from its start.

    `tp` is the part of the tensor that the range lies in, where tensor parallelism has cut it: elements are then
    counted in all parts laid end to end.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    elements: Span
    read: Callable[[Span], torch.Tensor]
    tp: TensorPart | None = None

    @classmethod
    def whole(cls, key: str, tensor: torch.Tensor) -> TensorSlice:
        flat = tensor.detach().reshape(-1)
        return cls(key, tensor.dtype, tuple(tensor.shape), Span(0, flat.numel()), lambda part: flat[part.slice])

    @property
    def size_bytes(self) -> int:
        return self.elements.numel * self.dtype.itemsize

    @property
    def cut(self) -> tuple[int, int] | None:
        """How the manifest says that elements are counted (see `StoredTensor`)."""
        return self.tp.stored_cut if self.tp is not None else None

    @property
    def shape_in_file(self) -> Sequence[int]:
        """The tensor's shape for a slice that is all of it; otherwise the slice is flat."""
        return self.shape if self.elements == Span(0, math.prod(self.shape)) else [self.elements.numel]

    def parts(self) -> Iterator[tuple[Span, torch.Tensor]]:
        """The elements, counted from the tensor's start, in parts of a few MB."""
        for part in Span(0, self.elements.numel).split(CHUNK_BYTES // self.dtype.itemsize):
            yield part.shift(self.elements.start), self.read(part)

    def parts_in_order(self) -> Iterator[tuple[Span, torch.Tensor]]:
        """Like `parts`, with elements counted in the tensor's own order."""
        for elements, values in self.parts():
            if self.tp is None:
                yield elements, values
                continue
            mine = elements.shift(-self.tp.start)
            for start, stop, place in self.tp.runs(mine.start, mine.stop):
                yield Span(place, place + stop - start), values[start - mine.start : stop - mine.start]

    def copied_to(self, flat: torch.Tensor) -> TensorSlice:
        """The slice, to be read from a copy of its elements in `flat`. The copy may be asynchronous."""
        flat.copy_(self.read(Span(0, self.elements.numel)), non_blocking=True)
        return replace(self, read=lambda part: flat[part.slice])


def spread(lengths: Sequence[int], start: int, numel: int) -> Iterator[tuple[int, Span]]:
    """Where `numel` elements from `start` on lie in vectors laid end to end: the number and a part of each vector.

    >>> list(spread([4, 4, 4], 3, 6))
    [(0, Span(start=3, stop=4)), (1, Span(start=0, stop=4)), (2, Span(start=0, stop=1))]
    """
    for index, stop in enumerate(accumulate(lengths)):
        first = stop - lengths[index]
        if part := Span(start, start + numel).intersect(Span(first, stop)):
            yield index, part.shift(-first)


def joined(slices: Sequence[TensorSlice]) -> list[TensorSlice]:
    """The slices, those of one key as one: with a small `buffer_bytes`, the optimizer updates a parameter in several
    pieces, and a safetensors file can hold a key only once (test_a_key_in_several_pieces_is_one_tensor_of_a_file)."""
    by_key: dict[str, list[TensorSlice]] = {}
    for each in slices:
        by_key.setdefault(each.key, []).append(each)
    return [parts[0] if len(parts) == 1 else _join(parts) for parts in by_key.values()]


def _join(parts: list[TensorSlice]) -> TensorSlice:
    parts = sorted(parts, key=lambda part: part.elements.start)
    assert all(one.elements.stop == other.elements.start for one, other in pairwise(parts)), "a rank owns one range"
    lengths = [part.elements.numel for part in parts]

    def read(wanted: Span) -> torch.Tensor:
        found = [parts[index].read(part) for index, part in spread(lengths, wanted.start, wanted.numel)]
        return found[0] if len(found) == 1 else torch.cat([each.cpu() for each in found])

    return replace(parts[0], elements=Span(parts[0].elements.start, parts[-1].elements.stop), read=read)


def write_tensors(path: Location, slices: Sequence[TensorSlice]) -> tuple[BlockWriter, list[int]]:
    """Write a safetensors file, durably; returns its writer, and where each slice's bytes begin in the file."""
    header, offsets = header_of([(each.key, each.dtype, each.shape_in_file) for each in slices])
    with BlockWriter(path) as writer:
        writer.write(memoryview(header))
        for _, each in sorted(zip(offsets, slices, strict=True), key=lambda pair: pair[0]):
            for _, values in each.parts():
                writer.write(as_bytes(values))
    return writer, offsets


def header_of(
    tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]], metadata: bool = False
) -> tuple[bytes, list[int]]:
    """The header of a safetensors file that holds these tensors, and where the bytes of each begin."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}} if metadata else {}
    position, starts = 0, [0] * len(tensors)
    # Wider elements first, so that each tensor is aligned to its element.
    for index in sorted(range(len(tensors)), key=lambda index: -tensors[index][1].itemsize):
        key, dtype, shape = tensors[index]
        if dtype not in _NAMES:
            raise CheckpointError(f"{key} has dtype {dtype}, which a checkpoint cannot hold")
        stop = position + math.prod(shape) * dtype.itemsize
        entries[key] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [position, stop]}
        starts[index], position = position, stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, [start + len(header) for start in starts]


def as_bytes(values: torch.Tensor) -> memoryview:
    """A tensor's bytes; a copy only of a tensor outside host memory or not contiguous."""
    flat = values.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


class CheckpointReader(contextlib.ExitStack):
    """Reads and verifies the tensors of a checkpoint. A file is opened when its first tensor is read."""

    def __init__(self, folder: Location, manifest: Manifest) -> None:
        super().__init__()
        self.folder = folder
        self.manifest = manifest
        self._readers: dict[int, BlockReader] = {}

    def parts(
        self, stored: StoredTensor, wanted: Span, tp: TensorPart | None = None
    ) -> Iterator[tuple[Span, torch.Tensor]]:
        """The elements `wanted` of a tensor, or of the part `tp` of it, in parts of a few MB."""
        tp = tp or TensorPart(stored.shape)
        if stored.cut == tp.stored_cut:
            for elements, values in self._stored_parts(stored, wanted.shift(tp.start)):
                yield elements.shift(-tp.start), values
        else:
            yield from self._parts_by_rows(stored, wanted, tp)

    def _parts_by_rows(self, stored: StoredTensor, wanted: Span, tp: TensorPart) -> Iterator[tuple[Span, torch.Tensor]]:
        """`parts` of a file that has the tensor cut in another way."""
        row = math.prod(tp.local_shape[1:])
        block = max(1, CHUNK_BYTES // (math.prod(stored.shape[1:]) * stored.torch_dtype.itemsize))
        end, above = -(-wanted.stop // row), tp.offset if tp.dim == 0 else 0
        for first in range(wanted.start // row, end, block):
            last = min(first + block, end)
            rows = self._rows(stored, Span(first, last).shift(above))
            values = (rows.narrow(tp.dim, tp.offset, tp.size) if tp.dim else rows).reshape(-1)
            part = Span(first * row, last * row).intersect(wanted)
            yield part, values[part.shift(-first * row).slice]

    def _rows(self, stored: StoredTensor, rows: Span) -> torch.Tensor:
        """Indices `rows` of a tensor's first dimension."""
        parts = []
        for part in stored.tp_parts:
            each = math.prod(part.local_shape[1:])
            span = Span(part.start + rows.start * each, part.start + rows.stop * each)
            flat = torch.cat([stored_values for _, stored_values in self._stored_parts(stored, span)])
            parts.append(flat.view(rows.numel, *part.local_shape[1:]))
        return torch.cat(parts, dim=stored.cut[0] if stored.cut else 0)

    def _stored_parts(self, stored: StoredTensor, wanted: Span) -> Iterator[tuple[Span, torch.Tensor]]:
        """The elements `wanted`, counted as they are stored."""
        dtype = stored.torch_dtype
        for piece in pieces_over(stored.pieces, dtype.itemsize, wanted):
            for part in Span(piece.start, piece.stop).split(CHUNK_BYTES // dtype.itemsize):
                values = torch.empty(part.numel, dtype=dtype)
                offset = piece.offset + (part.start - piece.start) * dtype.itemsize
                self._file(piece.file).read_into(as_bytes(values), offset)
                yield part, values

    def whole(self, key: str) -> torch.Tensor:
        """A tensor in its shape."""
        stored = self.manifest.tensors.get(key)
        if stored is None:
            raise CheckpointError(f"{self.folder} has no tensor {key!r}")
        values = torch.empty(stored.numel, dtype=stored.torch_dtype)
        for part, data in self.parts(stored, Span(0, stored.numel)):
            values[part.slice] = data
        return values.view(stored.shape)

    def check_headers(self) -> None:
        """Raise a DamagedError unless each file's own header says of its tensors what the manifest says."""
        found = [dict[str, str]() for _ in self.manifest.files]
        for key, stored in self.manifest.tensors.items():
            for piece in stored.pieces:
                found[piece.file][key] = _NAMES.get(stored.torch_dtype, "none")
        for number, dtypes in enumerate(found):
            header = self._file(number).header()
            for key, dtype in dtypes.items():
                if header.get(key, SafetensorsEntry(dtype="")).dtype != dtype:
                    raise DamagedError(
                        f"{self._file(number).path} does not hold {key} as {dtype}, as its manifest says: {REMEDY}"
                    )

    def _file(self, number: int) -> BlockReader:
        if number not in self._readers:
            file = self.manifest.files[number]
            reader = BlockReader(self.folder / file.name, file.size_bytes, file.checksums)
            self._readers[number] = self.enter_context(contextlib.closing(reader))
        return self._readers[number]


class SafetensorsEntry(BaseModel):
    """The dtype of a tensor in the header of a safetensors file, which also has its shape and place."""

    dtype: str = ""


class BlockWriter:
    """Writes a new file and computes a checksum of every block."""

    def __init__(self, path: Location, block_bytes: int = BLOCK_BYTES) -> None:
        self.size_bytes = 0
        self.checksums: list[int] = []
        self._block_bytes = block_bytes
        self._file = storage_of(path).create(path)

    def write(self, data: memoryview) -> None:
        position = 0
        while position < len(data):
            room = self._block_bytes - self.size_bytes % self._block_bytes
            if room == self._block_bytes:
                self.checksums.append(0)
            part = data[position : position + room]
            part = part[: self._file.write(part)]
            self.checksums[-1] = zlib.crc32(part, self.checksums[-1])
            self.size_bytes += len(part)
            position += len(part)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is None:
            # The bytes are durable before the rank's table says that the file is complete, and so before the folder
            # becomes a checkpoint: test_kills_at_random_moments_lose_nothing.
            self._file.finish()
        else:
            self._file.abandon()


class BlockReader:
    """Reads parts of a file and verifies each block that they touch."""

    def __init__(self, path: Location, size_bytes: int, checksums: list[int], block_bytes: int = BLOCK_BYTES) -> None:
        self.path = path
        self._size_bytes = size_bytes
        self._checksums = checksums
        self._block_bytes = block_bytes
        self._blocks: dict[int, bytes] = {}
        try:
            self._file, seen = storage_of(path).open(path)
        except OSError as error:
            raise DamagedError(f"{path} cannot be read: {error.strerror or error}") from None
        if seen != size_bytes:
            self.close()
            raise DamagedError(f"{path} is damaged: it has {seen} bytes, and {size_bytes} were written")

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` with the bytes from `offset` on."""
        position = 0
        while position < len(target):
            number, start = divmod(offset + position, self._block_bytes)
            part = memoryview(self._block(number))[start : start + len(target) - position]
            target[position : position + len(part)] = part
            position += len(part)

    def header(self) -> dict[str, SafetensorsEntry]:
        """The header of a safetensors file; empty for a file that has none."""
        length = bytearray(8)
        self.read_into(memoryview(length), 0)
        size_bytes = int.from_bytes(length, "little")
        if size_bytes > self._size_bytes - 8:
            raise DamagedError(f"{self.path} is not a safetensors file: {REMEDY}")
        text = bytearray(size_bytes)
        self.read_into(memoryview(text), 8)
        parsed = parse_json(text.decode(errors="replace"), str(self.path), DamagedError, REMEDY)
        return validated(dict[str, SafetensorsEntry], parsed, str(self.path), DamagedError, REMEDY)

    def verify(self) -> None:
        """Read and verify all blocks."""
        for number in range(len(self._checksums)):
            self._block(number)

    def close(self) -> None:
        self._file.close()

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            start = number * self._block_bytes
            self._file.seek(start)
            data = self._file.read(self._block_bytes)
            if zlib.crc32(data) != self._checksums[number]:
                span = f"{start} to {start + len(data)}"
                raise DamagedError(f"{self.path} is damaged: its bytes {span} are not those that were written")
            self._blocks[number] = data
            if len(self._blocks) > _CACHED_BLOCKS:
                del self._blocks[next(iter(self._blocks))]  # the oldest
        return self._blocks[number]
