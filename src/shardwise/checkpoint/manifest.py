"""The manifest of a checkpoint: what is stored, where, and how to tell that it is all there.

`manifest.json` is one line, `{"sha256": "...", "manifest": {...}}`, whose digest is that of the inner text as it
stands: whatever bit of it changes is found. Names of parameters are the keys; neither units nor ranks are, so any
layout can load what another one saved.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from shardwise.checkpoint.plain import dtype_named
from shardwise.checkpoint.ranges import Piece, gap
from shardwise.errors import CheckpointError, DamagedError

FORMAT = "shardwise-checkpoint"
VERSION = 1
FILE_NAME = "manifest.json"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_HEAD, _MIDDLE, _TAIL = '{"sha256": "', '", "manifest": ', "}\n"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StoredFile(_Model):
    """A file beside the manifest: its size, and the CRC-32 of each block as 8 hex digits."""

    name: str
    size_bytes: int
    crc32: str

    @field_validator("name")
    @classmethod
    def _stays_in_its_folder(cls, name: str) -> str:
        if not _PLAIN_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no plain file name")
        return name

    @property
    def checksums(self) -> list[int]:
        return [int(self.crc32[start : start + 8], 16) for start in range(0, len(self.crc32), 8)]


class Stored(_Model):
    """A tensor, whole or in pieces by its flat elements, sorted."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        return dtype_named(self.dtype)


class ParamInfo(_Model):
    """What is known of a parameter besides its values.

    compute  the dtype it computes in
    aliases  its other names, if it is tied
    group    the number of its optimizer group; None if it is frozen
    extras   optimizer state that is not one value per element, in the form of `plain`
    """

    compute: str
    aliases: tuple[str, ...] = ()
    group: int | None = None
    extras: dict[str, Any] = {}


class Manifest(_Model):
    """Everything about one checkpoint but its bytes.

    serial    grows with every checkpoint of a folder: the newest has the highest
    params    by name, in the model's order
    tensors   by key: `param/NAME`, `optim/exp_avg/NAME`, `buffer/NAME`, `rank-3/rng/torch`, `state/...`
    training  counters, loss scale, learning-rate schedule, parameter groups, in the form of `plain`
    ranks     random number generators of each rank, in the form of `plain`
    state     the user's own, in the form of `plain`
    config    the text of the model's `config.json`, if it has one
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
    tensors: dict[str, Stored]
    training: dict[str, Any]
    ranks: tuple[Any, ...] = ()
    state: Any = None
    config: str | None = None

    def to_text(self) -> str:
        body = json.dumps(self.model_dump(mode="json"), separators=(",", ":"), allow_nan=False)
        return f"{_HEAD}{_digest(body)}{_MIDDLE}{body}{_TAIL}"

    def check(self) -> None:
        """That every tensor is there without a gap, and lies inside a file that is listed."""
        for key, stored in self.tensors.items():
            missing = gap(stored.pieces, stored.numel)
            if missing is not None:
                raise CheckpointError(f"elements {missing.start} to {missing.stop} of {key} are missing or there twice")
            for piece in stored.pieces:
                stop = piece.offset + (piece.stop - piece.start) * stored.torch_dtype.itemsize
                size_bytes = self.files[piece.file].size_bytes if 0 <= piece.file < len(self.files) else -1
                if not 0 <= piece.offset <= stop <= size_bytes:
                    raise CheckpointError(f"a piece of {key} lies outside of every file")

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, verified; a CheckpointError says what is wrong."""
    path, body = folder / FILE_NAME, _read_body(folder)
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


def read_head(folder: Path) -> tuple[str, int]:
    """Tag and serial number of a checkpoint, its manifest verified."""
    body = _read_body(folder)
    return str(body.get("tag")), int(body.get("serial", -1))


def _read_body(folder: Path) -> dict[str, Any]:
    path = folder / FILE_NAME
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DamagedError(f"{path} is damaged: it is no text") from None
    start = len(_HEAD) + 64 + len(_MIDDLE)
    digest, body = text[len(_HEAD) : len(_HEAD) + 64], text[start : -len(_TAIL)]
    if text != f"{_HEAD}{digest}{_MIDDLE}{body}{_TAIL}" or digest != _digest(body):
        raise DamagedError(f"{path} is damaged: it is not what was written")
    content = json.loads(body)
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has format {content.get('format')!r} version {content.get('version')!r}; this version of "
            f"shardwise reads {FORMAT!r} version {VERSION}"
        )
    return dict(content)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
