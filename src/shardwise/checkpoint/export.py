"""Export of the weights in Hugging Face's layout: safetensors with an index.

The position of every tensor follows from the shapes, so each rank writes the elements that it owns straight into place,
cast on the way. Nothing is gathered, and a rank needs a few MB beside its shard
(test_load_and_export_need_little_beside_what_is_there).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import torch

from shardwise.checkpoint.checkpointable import (
    Checkpointable,
    config_text,
    on_all_ranks,
    on_rank_0,
    overlaps,
    persistent_buffers,
)
from shardwise.checkpoint.files import CheckpointReader, as_bytes, chunks, header_of
from shardwise.checkpoint.folder import LATEST, candidates, sync_folder, writing
from shardwise.checkpoint.manifest import read_manifest
from shardwise.checkpoint.plain import dtype_named
from shardwise.errors import CheckpointError, ConfigError
from shardwise.optim.states import MASTER, state_views
from shardwise.partition.layout import Span
from shardwise.partition.policy import DTYPES
from shardwise.sizes import format_bytes, parse_bytes

MAX_FILE_BYTES = 5_000_000_000
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class ExportedTensor(NamedTuple):
    """The dtype and shape in which a tensor is exported."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class ExportLayout:
    """Which tensors go into which file, and where their bytes begin in it."""

    tensors: Mapping[str, ExportedTensor]
    files: Mapping[str, list[str]]
    headers: Mapping[str, bytes]
    offsets: Mapping[str, tuple[str, int]]

    @classmethod
    def build(cls, tensors: Mapping[str, ExportedTensor], max_bytes: int) -> ExportLayout:
        """Files in the order of the tensors, each as full as `max_bytes` allows."""
        groups: list[list[str]] = [[]]
        size_bytes = 0
        for name, tensor in tensors.items():
            if groups[-1] and size_bytes + tensor.size_bytes > max_bytes:
                groups.append([])
                size_bytes = 0
            groups[-1].append(name)
            size_bytes += tensor.size_bytes
        count = len(groups)
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        files = dict(zip(names if count > 1 else [_SINGLE], groups, strict=True))
        headers, offsets = {}, {}
        for file, group in files.items():
            # Wider elements first, so that each tensor is aligned to its element.
            group.sort(key=lambda name: -tensors[name].dtype.itemsize)
            headers[file], starts = header_of([(name, *tensors[name]) for name in group], metadata=True)
            offsets.update({name: (file, start) for name, start in zip(group, starts, strict=True)})
        return cls(tensors, files, headers, offsets)

    def index(self) -> str | None:
        """The text of the index; None if there is one file."""
        if len(self.files) == 1:
            return None
        total = sum(tensor.size_bytes for tensor in self.tensors.values())
        weight_map = {name: self.offsets[name][0] for name in self.tensors}
        return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"


class ExportFiles:
    """The open files of an export, to be written in any order."""

    def __init__(self, folder: Path, layout: ExportLayout) -> None:
        self._layout = layout
        self._folder = folder
        self._descriptors = {file: os.open(folder / file, os.O_WRONLY) for file in layout.files}

    @staticmethod
    def create(folder: Path, layout: ExportLayout, config: str | None) -> None:
        """Create the files in their full size, with everything except the values."""
        for file, names in layout.files.items():
            size_bytes = len(layout.headers[file]) + sum(layout.tensors[name].size_bytes for name in names)
            with (folder / file).open("xb") as opened:
                opened.write(layout.headers[file])
                opened.truncate(size_bytes)
        for name, text in ((_INDEX, layout.index()), ("config.json", config)):
            if text is not None:
                (folder / name).write_text(text)

    def put(self, name: str, elements: Span, values: torch.Tensor) -> None:
        """Write some elements of a tensor, cast to its exported dtype."""
        file, offset = self._layout.offsets[name]
        dtype = self._layout.tensors[name].dtype
        data, start = as_bytes(values.to(dtype)), offset + elements.start * dtype.itemsize
        with writing(self._folder / file):
            while data:
                written = os.pwrite(self._descriptors[file], data, start)
                data, start = data[written:], start + written

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        with writing(self._folder), contextlib.ExitStack() as stack:
            for descriptor in self._descriptors.values():
                stack.callback(os.close, descriptor)
                stack.callback(os.fsync, descriptor)


def export(engine: Checkpointable, folder: Path, dtype: torch.dtype | None, max_bytes: int) -> None:
    """Write an engine's weights into the new folder `folder`. See `Engine.export`. A collective."""
    comm = engine.comm
    tensors, buffers = {}, persistent_buffers(engine.module)
    units = {name: unit for unit in engine.units for name in unit.names}
    for name, _ in engine.module.named_parameters():
        unit = units[name]
        tensors[name] = _exported(unit.weights.policy.weight_dtype, unit.layout.slot(name).spec.shape, dtype)
    tensors.update({name: ExportedTensor(buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers.items()})
    layout = ExportLayout.build(tensors, max_bytes)
    draft = on_rank_0(comm, lambda: _begin(folder, layout, config_text(engine.module)))

    def write() -> None:
        with ExportFiles(draft, layout) as files:
            for name, elements, values in _owned(engine):
                files.put(name, elements, values)
            for name, buffer in buffers.items() if comm.rank == 0 else ():
                files.put(name, Span(0, buffer.numel()), buffer)

    try:
        on_all_ranks(comm, write)
        on_rank_0(comm, lambda: _end(draft, folder))
    except BaseException:
        if comm.rank == 0:  # other ranks cannot know whether rank 0 is renaming the folder
            shutil.rmtree(draft, ignore_errors=True)
        raise


def export_checkpoint(
    source: Path, folder: Path, dtype: torch.dtype | None = None, max_bytes: int = MAX_FILE_BYTES, tag: str = LATEST
) -> Path:
    """Export a checkpoint without an engine, on any machine; returns the checkpoint's path.

    `source` is a checkpoint or a folder of checkpoints, of which `tag` names one. Every byte that is read is verified.
    """
    path = candidates(source, tag, fallback=False)[0]
    manifest = read_manifest(path)
    keys = {name: f"{MASTER}/{name}" for name in manifest.params}
    keys |= {key.removeprefix("buffer/"): key for key in manifest.tensors if key.startswith("buffer/")}
    tensors = {}
    for name, key in keys.items():
        stored = manifest.tensors[key]
        param = manifest.params.get(name)
        default = dtype_named(param.compute) if param is not None else stored.torch_dtype
        tensors[name] = _exported(default, stored.shape, dtype if param is not None else None)
    layout = ExportLayout.build(tensors, max_bytes)
    draft = _begin(folder, layout, manifest.config)

    def write() -> None:
        with CheckpointReader(path, manifest) as reader, ExportFiles(draft, layout) as files:
            for name, key in keys.items():
                stored = manifest.tensors[key]
                for elements, values in reader.parts(stored, Span(0, stored.numel)):
                    files.put(name, elements, values)

    try:
        write()
        _end(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return path


def export_command(source: Path, folder: Path, dtype: str | None, tag: str, max_file: str) -> str:
    """Run `shardwise export`; returns one line about what was written."""
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: use one of {', '.join(DTYPES)}")
    try:
        max_bytes = parse_bytes(max_file)
    except ValueError as error:
        raise ConfigError(f"--max-file {max_file}: {error}") from None
    path = export_checkpoint(source, folder, DTYPES[dtype] if dtype is not None else None, max_bytes, tag)
    written = [file for file in folder.iterdir() if file.suffix == ".safetensors"]
    size = format_bytes(sum(file.stat().st_size for file in written))
    return f"exported {path} to {folder}: {len(written)} file{'s' if len(written) > 1 else ''}, {size}"


def _owned(engine: Checkpointable) -> Iterator[tuple[str, Span, torch.Tensor]]:
    """The weights that this rank owns in the layout, a few MB at a time."""
    for unit in engine.units:
        owned = unit.layout.shard(engine.comm.rank)
        for view in state_views(unit, None):
            for slot, part in overlaps(unit, view.span.intersect(owned)):
                for chunk in chunks(part, view.dtype.itemsize):
                    yield slot.spec.name, chunk.shift(-slot.span.start), view.read(chunk)


def _exported(default: torch.dtype, shape: tuple[int, ...], wanted: torch.dtype | None) -> ExportedTensor:
    return ExportedTensor(wanted if wanted is not None and default.is_floating_point else default, shape)


def _begin(folder: Path, layout: ExportLayout, config: str | None) -> Path:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not an empty folder: export to a new one, or remove it first")
    draft = folder.parent / f".tmp-export-{folder.name}-{os.urandom(4).hex()}"
    with writing(folder):
        draft.mkdir(parents=True)
        try:
            ExportFiles.create(draft, layout, config)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    return draft


def _end(draft: Path, folder: Path) -> None:
    # As for a checkpoint: everything is durable before the rename, so the folder is complete or absent.
    with writing(folder):
        sync_folder(draft)
        os.rename(draft, folder)
        sync_folder(folder.parent)
