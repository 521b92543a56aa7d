"""Tensors in safetensors files, streamed: neither side ever holds more than a piece of one."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from shardwise.checkpoint.blocks import BlockReader, BlockWriter
from shardwise.checkpoint.contents import Item
from shardwise.checkpoint.manifest import Manifest, Stored
from shardwise.checkpoint.ranges import fetches
from shardwise.errors import CheckpointError
from shardwise.partition.layout import Span

CHUNK_BYTES = 4 << 20
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
}


def write_tensors(path: Path, items: Sequence[Item]) -> tuple[BlockWriter, list[int]]:
    """Write a safetensors file; what was written, and where each item's bytes begin in it."""
    # Wider elements first, so that each tensor is aligned to its element.
    order = sorted(range(len(items)), key=lambda index: -items[index].dtype.itemsize)
    header, offsets = header_of((items[index].key, items[index].dtype, _shape(items[index])) for index in order)
    with BlockWriter(path) as writer:
        writer.write(memoryview(header))
        for index in order:
            for part in chunks(Span(0, items[index].elements.numel), items[index].dtype.itemsize):
                writer.write(as_bytes(items[index].read(part)))
    by_item = dict(zip(order, offsets, strict=True))
    return writer, [by_item[index] for index in range(len(items))]


def chunks(span: Span, itemsize: int) -> Iterator[Span]:
    """A span in parts of a few MB."""
    step = CHUNK_BYTES // itemsize
    for start in range(span.start, span.stop, step):
        yield Span(start, min(start + step, span.stop))


def as_bytes(values: torch.Tensor) -> memoryview:
    """A tensor's bytes; a copy only if it is not in host memory."""
    flat = values.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


class Reader:
    """Reads the tensors of a checkpoint, verified; opens a file when something in it is wanted."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._readers: dict[int, BlockReader] = {}

    def parts(self, stored: Stored, wanted: Span) -> Iterator[tuple[Span, torch.Tensor]]:
        """The elements `wanted` of a tensor, in parts of a few MB."""
        dtype = stored.torch_dtype
        for fetch in fetches(stored.pieces, dtype.itemsize, wanted):
            for part in chunks(fetch.elements, dtype.itemsize):
                values = torch.empty(part.numel, dtype=dtype)
                offset = fetch.offset + (part.start - fetch.elements.start) * dtype.itemsize
                self._file(fetch.file).read_into(as_bytes(values), offset)
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

    def _file(self, number: int) -> BlockReader:
        if number not in self._readers:
            file = self.manifest.files[number]
            self._readers[number] = BlockReader(self.folder / file.name, file.size_bytes, file.checksums)
        return self._readers[number]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.ExitStack() as stack:
            for reader in self._readers.values():
                stack.callback(reader.close)


def header_of(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: bool = False
) -> tuple[bytes, list[int]]:
    """The beginning of a safetensors file that holds these tensors in this order, and where the bytes of each begin."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}} if metadata else {}
    position, starts = 0, []
    for key, dtype, shape in tensors:
        if dtype not in _NAMES:
            raise CheckpointError(f"{key} has dtype {dtype}, which a checkpoint cannot hold")
        stop = position + math.prod(shape) * dtype.itemsize
        entries[key] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [position, stop]}
        starts.append(position)
        position = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, [start + len(header) for start in starts]


def _shape(item: Item) -> Sequence[int]:
    is_whole = item.elements == Span(0, math.prod(item.shape))
    return item.shape if is_whole else [item.elements.numel]
