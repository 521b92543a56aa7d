"""The manifest of a checkpoint: what is stored, where, and how to verify that all of it is there.

`manifest.json` is one line, `{"sha256": "...", "manifest": {...}}`. The digest is that of the inner text, byte for
byte, so it finds any changed bit. Tensors are keyed by parameter names. World size, units and stages are not part of
the format: a tensor is stored as ranges of its flat elements, each in some file, and a rank that loads intersects these
ranges with the elements that it owns. So every layout loads what any other layout saved.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from shardwise.checkpoint.plain import dtype_named
from shardwise.errors import CheckpointError, DamagedError
from shardwise.partition.layout import Span

FORMAT = "shardwise-checkpoint"
VERSION = 1
FILE_NAME = "manifest.json"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_TEXT = re.compile(r'\{"sha256": "(.{64})", "manifest": (.*)\}\n', re.DOTALL)


class StoredRange(NamedTuple):
    """The flat elements [start, stop) of a tensor, `offset` bytes into the file with number `file`."""

    file: int
    start: int
    stop: int
    offset: int


def pieces_over(ranges: Sequence[StoredRange], itemsize: int, wanted: Span) -> Iterator[StoredRange]:
    """The parts of `ranges` to read for the elements `wanted`, in order. `ranges` are sorted and cover them.

    >>> list(pieces_over([StoredRange(0, 0, 10, 8), StoredRange(1, 10, 16, 8)], 4, Span(8, 10)))
    [StoredRange(file=0, start=8, stop=10, offset=40)]
    """
    index = bisect_right(ranges, wanted.start, key=lambda each: each.stop)
    position = wanted.start
    while position < wanted.stop:
        file, start, stop, offset = ranges[index]
        yield StoredRange(file, position, min(stop, wanted.stop), offset + (position - start) * itemsize)
        position, index = stop, index + 1


def gap(ranges: Sequence[StoredRange], numel: int) -> Span | None:
    """The first elements of a tensor of `numel` that sorted `ranges` lack or have twice; None if there are none."""
    position = 0
    for _, start, stop, _ in (*ranges, StoredRange(-1, numel, numel + 1, 0)):
        if start != position or stop <= start:
            return Span(min(position, start), max(position, start))
        position = stop
    return None


class _ManifestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StoredFile(_ManifestModel):
    """A file beside the manifest: its size, and the CRC-32 of each block as 8 hex digits."""

    name: str
    size_bytes: int
    crc32: str

    @field_validator("name")
    @classmethod
    def _stays_in_its_folder(cls, name: str) -> str:
        if not _PLAIN_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a plain file name")
        return name

    @property
    def checksums(self) -> list[int]:
        return [int(self.crc32[start : start + 8], 16) for start in range(0, len(self.crc32), 8)]


class StoredTensor(_ManifestModel):
    """A tensor, in sorted ranges of its flat elements, which the format calls pieces."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredRange, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        return dtype_named(self.dtype)


class ParamInfo(_ManifestModel):
    """The facts about a parameter besides its values.

    compute  the dtype of the weights that compute
    aliases  the other names of a tied parameter
    group    the number of its optimizer group; None for a frozen parameter
    extras   optimizer state that is not one value per element, as `plain` encodes it
    """

    compute: str
    aliases: tuple[str, ...] = ()
    group: int | None = None
    extras: dict[str, Any] = {}


class Manifest(_ManifestModel):
    """Everything about one checkpoint except its tensors' bytes.

    serial    grows with every checkpoint of a folder: the newest checkpoint has the highest
    params    by name, in the model's order
    tensors   by key: `param/NAME`, `optim/exp_avg/NAME`, `buffer/NAME`, `rank-3/rng/torch`, `state/...`
    training  counters, loss scale, learning-rate schedule, parameter groups, as `plain` encodes them
    ranks     random number generators of each rank, as `plain` encodes them
    state     the user's state, as `plain` encodes it
    config    the text of the model's `config.json`; None for a model without one
    """

    format: str = FORMAT
    version: int = VERSION
    tag: str
    serial: int
    steps: int
    world_size: int
    written_by: str
    optimizer: str | None
    files: tuple[StoredFile, ...]
    params: dict[str, ParamInfo]
    tensors: dict[str, StoredTensor]
    training: dict[str, Any]
    ranks: tuple[Any, ...] = ()
    state: Any = None
    config: str | None = None

    def to_text(self) -> str:
        body = json.dumps(self.model_dump(mode="json"), separators=(",", ":"), allow_nan=False)
        return f'{{"sha256": "{_digest(body)}", "manifest": {body}}}\n'

    def check(self) -> None:
        """Raise a CheckpointError unless every tensor is complete and lies inside the listed files."""
        for key, stored in self.tensors.items():
            if (span := gap(stored.pieces, stored.numel)) is not None:
                raise CheckpointError(f"elements {span.start} to {span.stop} of {key} are missing or stored twice")
            for piece in stored.pieces:
                stop = piece.offset + (piece.stop - piece.start) * stored.torch_dtype.itemsize
                size_bytes = self.files[piece.file].size_bytes if 0 <= piece.file < len(self.files) else -1
                if not 0 <= piece.offset <= stop <= size_bytes:
                    raise CheckpointError(f"a range of {key} lies outside of every file")

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def read_manifest(folder: Path) -> Manifest:
    """The verified manifest of a checkpoint; a CheckpointError says what is wrong with it."""
    path, body = folder / FILE_NAME, read_body(folder)
    try:
        manifest = Manifest.model_validate(body)
        manifest.check()
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{path} is not as shardwise writes it: {place}: {first['msg']}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return manifest


def read_body(folder: Path) -> dict[str, Any]:
    """The content of a manifest; verifies the digest, not the tensors."""
    path = folder / FILE_NAME
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DamagedError(f"{path} is damaged: it is not text") from None
    match = _TEXT.fullmatch(text)
    if match is None or match[1] != _digest(match[2]):
        raise DamagedError(f"{path} is damaged: it is not what was written")
    content = json.loads(match[2])
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has format {content.get('format')!r} version {content.get('version')!r}; this version of "
            f"shardwise reads {FORMAT!r} version {VERSION}"
        )
    return dict(content)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
