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
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, Self

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from shardwise.checkpoint.object_store import storage_of
from shardwise.checkpoint.plain import REMEDY, dtype_named
from shardwise.checkpoint.storage import MANIFEST, Location
from shardwise.errors import CheckpointError, DamagedError
from shardwise.files import parse_json, validated
from shardwise.optim.states import PARAM
from shardwise.partition.layout import Span
from shardwise.partition.part import TensorPart

FORMAT = "shardwise-checkpoint"
VERSION = 3
"""The newest version of the format. Checkpoints are written in the oldest that can hold them: see `version_of`."""
BLOCK_BYTES = 1 << 20
"""The bytes of a file that one checksum covers."""
TAG = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}"
_WHOLE_TAG = rf"\A{TAG}\z"
_OTHER_KINDS = (PARAM, "buffer", "training", "state", "extra")
"""Kinds of tensors that need not have a parameter's shape; those of one rank's generators are others."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_TEXT = re.compile(r'\{"sha256": "(.{64})", "manifest": (.*)\}\n', re.DOTALL)


def version_of(tp: int, pp: int) -> int:
    """Version 2 has tensors that tensor parallelism has cut, version 3 the size of a pipeline."""
    return 3 if pp > 1 else 2 if tp > 1 else 1


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


def _known_dtype(name: str) -> str:
    dtype_named(name)
    return name


DtypeName = Annotated[str, AfterValidator(_known_dtype)]
Count = Annotated[int, Field(strict=True, ge=0)]


class _ManifestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StoredFile(_ManifestModel):
    """A file beside the manifest: its size, and the CRC-32 of each block as 8 hex digits."""

    name: str
    size_bytes: Count
    crc32: str = Field(pattern=r"\A([0-9a-f]{8})*\z")

    @field_validator("name")
    @classmethod
    def _stays_in_its_folder(cls, name: str) -> str:
        if not _PLAIN_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a plain file name")
        return name

    @model_validator(mode="after")
    def _has_all_checksums(self) -> Self:
        blocks = -(-self.size_bytes // BLOCK_BYTES)
        if len(self.crc32) != 8 * blocks:
            raise ValueError(f"{len(self.crc32) // 8} checksums for {blocks} blocks of {self.name}")
        return self

    @property
    def checksums(self) -> list[int]:
        return [int(self.crc32[start : start + 8], 16) for start in range(0, len(self.crc32), 8)]


class StoredTensor(_ManifestModel):
    """A tensor, in sorted ranges of its flat elements, which the format calls pieces.

    With a `cut` of dimension d into n parts, as tensor parallelism made them, elements are counted in these parts laid
    end to end. Where d is 0 that is the tensor's own order, and nothing is recorded.
    """

    dtype: DtypeName
    shape: tuple[Count, ...]
    pieces: tuple[StoredRange, ...]
    cut: tuple[Count, Annotated[int, Field(strict=True, ge=2)]] | None = None

    @model_validator(mode="after")
    def _has_the_dimension_cut(self) -> Self:
        if self.cut is not None and not 0 < self.cut[0] < len(self.shape):
            raise ValueError(f"a tensor of shape {list(self.shape)} is not cut along dimension {self.cut[0]}")
        return self

    @model_serializer(mode="wrap")
    def _without_defaults(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Tensors that are not cut are written as before there were cuts."""
        return {key: value for key, value in dump(self).items() if key != "cut" or value is not None}

    @property
    def tp_parts(self) -> list[TensorPart]:
        """The parts in which it is stored."""
        dim, count = self.cut or (0, 1)
        return [TensorPart(self.shape, dim, count, index) for index in range(count)]

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

    compute: DtypeName
    aliases: tuple[str, ...] = ()
    group: Count | None = None
    extras: dict[str, Any] = {}


class Manifest(_ManifestModel):
    """Everything about one checkpoint except its tensors' bytes.

    tp        how many of the ranks that wrote it held one copy of the model, or of a stage of it, together
    pp        how many of them were one pipeline
    serial    grows with every checkpoint of a folder: the newest checkpoint has the highest
    params    by name, in the model's order
    tensors   by key: `param/NAME`, `optim/exp_avg/NAME`, `buffer/NAME`, `rank-3/rng/torch`, `state/...`
    training  counters, loss scale, learning-rate schedule, parameter groups, as `plain` encodes them
    ranks     random number generators of each rank, as `plain` encodes them
    state     the user's state, as `plain` encodes it
    config    the text of the model's `config.json`; None for a model without one
    left_out  the frozen parameters whose values were not saved; the key is absent if there are none
    """

    format: str = FORMAT
    version: int = 1
    tag: str = Field(pattern=_WHOLE_TAG)
    serial: Count
    steps: Count
    world_size: Annotated[int, Field(strict=True, ge=1)]
    tp: Annotated[int, Field(strict=True, ge=1)] = 1
    pp: Annotated[int, Field(strict=True, ge=1)] = 1
    written_by: str
    optimizer: str | None
    files: tuple[StoredFile, ...]
    params: dict[str, ParamInfo]
    tensors: dict[str, StoredTensor]
    training: dict[str, Any]
    ranks: tuple[Any, ...] = ()
    state: Any = None
    config: str | None = None
    left_out: tuple[str, ...] = ()

    def to_text(self) -> str:
        usual = {"tp": self.tp == 1, "pp": self.pp == 1, "left_out": not self.left_out}
        hidden = {name for name, is_usual in usual.items() if is_usual}
        body = json.dumps(self.model_dump(mode="json", exclude=hidden), separators=(",", ":"), allow_nan=False)
        return f'{{"sha256": "{_digest(body)}", "manifest": {body}}}\n'

    def check(self) -> None:
        """Raise a CheckpointError unless tensors are complete, fill the listed files, and fit the parameters."""
        filled: list[list[tuple[int, int]]] = [[] for _ in self.files]
        for key, stored in self.tensors.items():
            if (span := gap(stored.pieces, stored.numel)) is not None:
                raise CheckpointError(f"elements {span.start} to {span.stop} of {key} are missing or stored twice")
            for piece in stored.pieces:
                stop = piece.offset + (piece.stop - piece.start) * stored.torch_dtype.itemsize
                size_bytes = self.files[piece.file].size_bytes if 0 <= piece.file < len(self.files) else -1
                if not 0 <= piece.offset <= stop <= size_bytes:
                    raise CheckpointError(f"a range of {key} lies outside of every file")
                filled[piece.file].append((piece.offset, stop))
        for file, ranges in zip(self.files, filled, strict=True):
            _check_filled(file, sorted(ranges))
        self._check_params()

    def _check_params(self) -> None:
        stored_names = {key.partition("/")[2] for key in self.tensors if key.startswith(f"{PARAM}/")}
        for name in stored_names ^ set(self.params):
            raise CheckpointError(f"parameter {name} has no stored values, or is not listed")
        for name, param in self.params.items():
            stored = self.tensors[f"{PARAM}/{name}"]
            if param.group is not None and dtype_named(param.compute).itemsize > stored.torch_dtype.itemsize:
                raise CheckpointError(f"parameter {name} computes in {param.compute}, and {stored.dtype} is stored")
        for key, stored in self.tensors.items():
            model = self._model_of(key)
            if model is not None and (model not in self.tensors or self.tensors[model].shape != stored.shape):
                raise CheckpointError(f"{key} has shape {list(stored.shape)}, which is not that of {model}")
        if len(self.ranks) not in (0, self.world_size):
            raise CheckpointError(f"it has generators of {len(self.ranks)} ranks, and {self.world_size} ranks wrote it")

    def _model_of(self, key: str) -> str | None:
        """The tensor whose shape the one at `key` must have."""
        kind, _, name = key.partition("/")
        if kind == "optim":
            return f"{PARAM}/{name.partition('/')[2]}"
        if kind.startswith("rank-") and name.startswith("buffer/"):
            return name
        return f"{PARAM}/{name}" if kind not in _OTHER_KINDS and name in self.params else None

    def with_tied(self, tied: Mapping[str, str]) -> Self:
        """The same, with what is stored of a parameter also under another name of it."""
        params = {other: self.params[name] for other, name in tied.items() if name in self.params}
        masters = {f"{PARAM}/{name}": other for other, name in tied.items()}
        tensors = {
            key.removesuffix(tied[other]) + other: stored
            for key, stored in self.tensors.items()
            if (other := masters.get(key if key in masters else self._model_of(key) or "")) is not None
        }
        return self.model_copy(update={"params": {**self.params, **params}, "tensors": {**self.tensors, **tensors}})

    def renamed(self, names: Mapping[str, str]) -> Self:
        """The same, with other names of some parameters and buffers."""

        def key_of(key: str) -> str:
            kind, _, name = (self._model_of(key) or key).partition("/")
            return key.removesuffix(name) + names.get(name, name) if kind in (PARAM, "buffer") else key

        changes = {
            "params": {names.get(name, name): param for name, param in self.params.items()},
            "tensors": {key_of(key): stored for key, stored in self.tensors.items()},
            "left_out": tuple(names.get(name, name) for name in self.left_out),
        }
        return self.model_copy(update=changes) if names else self

    @property
    def layout(self) -> tuple[int, int, int]:
        """The sizes of the axes that decide what a rank held: of all ranks, of tp and of pp."""
        return self.world_size, self.tp, self.pp

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class ManifestHead(BaseModel):
    """What identifies a checkpoint in its folder; the same in every version of the format."""

    tag: str = Field(pattern=_WHOLE_TAG)
    serial: Count


def read_manifest(folder: Location) -> Manifest:
    """The verified manifest of a checkpoint; a CheckpointError says what is wrong with it."""
    path, body = folder / MANIFEST, read_body(folder)
    head_of(folder, body)
    manifest = validated(Manifest, body, str(path), DamagedError, REMEDY)
    try:
        manifest.check()
    except CheckpointError as error:
        raise DamagedError(f"{path} is not as shardwise writes it: {error}: {REMEDY}") from None
    return manifest


def head_of(folder: Location, body: Mapping[str, Any]) -> ManifestHead:
    """The head of a manifest; a CheckpointError if this version cannot read the rest."""
    path, version = folder / MANIFEST, body.get("version")
    if body.get("format") != FORMAT or not isinstance(version, int) or version < 1:
        raise DamagedError(
            f"{path} has format {body.get('format')!r} version {version!r}, which shardwise does not write: {REMEDY}"
        )
    if version > VERSION:
        raise CheckpointError(
            f"{path} was written by a newer version of shardwise (format {version}; this one reads up to {VERSION}): "
            "update shardwise"
        )
    return validated(ManifestHead, body, str(path), DamagedError, REMEDY)


def read_body(folder: Location) -> dict[str, Any]:
    """The content of a manifest; verifies the digest, not the content."""
    path = folder / MANIFEST
    try:
        text = storage_of(path).read([path])[0].decode()
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror}): {REMEDY}") from None
    except UnicodeDecodeError:
        raise DamagedError(f"{path} is damaged, it is not text: {REMEDY}") from None
    match = _TEXT.fullmatch(text)
    if match is None or match[1] != _digest(match[2]):
        raise DamagedError(f"{path} is damaged, it is not what was written: {REMEDY}")
    return validated(
        dict[str, Any], parse_json(match[2], str(path), DamagedError, REMEDY), str(path), DamagedError, REMEDY
    )


def _check_filled(file: StoredFile, ranges: Sequence[tuple[int, int]]) -> None:
    """Raise a CheckpointError unless sorted ranges of bytes fill a file to its end, behind its header.

    So a tensor whose dtype has another width than what was written is noticed.
    """
    for (_, stop), (start, _) in pairwise((*ranges, (file.size_bytes, 0)) if ranges else ()):
        if start != stop:
            raise CheckpointError(f"tensors overlap in {file.name}, or leave bytes {stop} to {start} of it unused")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
