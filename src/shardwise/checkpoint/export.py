"""Weights as others read them: Hugging Face's layout, safetensors with an index.

Where every tensor will lie follows from the shapes, so each rank writes the elements it owns straight into place,
rounded on the way: nothing is gathered, and nobody holds more than a few MB beside what it has.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import torch

from shardwise.checkpoint.contents import config_text, overlaps, persistent_buffers
from shardwise.checkpoint.files import Reader, as_bytes, chunks, header_of
from shardwise.checkpoint.folder import LATEST, candidates, sync_folder, writing
from shardwise.checkpoint.manifest import read_manifest
from shardwise.checkpoint.plain import dtype_named
from shardwise.checkpoint.together import first, together
from shardwise.errors import CheckpointError, ConfigError
from shardwise.optim.states import MASTER, state_views
from shardwise.partition.layout import Span
from shardwise.partition.policy import DTYPES
from shardwise.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine

MAX_FILE_BYTES = 5_000_000_000
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class Spec(NamedTuple):
    """A tensor to be exported."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Which tensors go into which file, and where their bytes begin in it."""

    specs: Mapping[str, Spec]
    files: Mapping[str, list[str]]
    headers: Mapping[str, bytes]
    places: Mapping[str, tuple[str, int]]

    @classmethod
    def build(cls, specs: Mapping[str, Spec], max_bytes: int) -> Layout:
        """Files in the order of the tensors, each as full as `max_bytes` allows."""
        groups: list[list[str]] = [[]]
        size = 0
        for name, spec in specs.items():
            if groups[-1] and size + spec.size_bytes > max_bytes:
                groups.append([])
                size = 0
            groups[-1].append(name)
            size += spec.size_bytes
        count = len(groups)
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        files = dict(zip(names if count > 1 else [_SINGLE], groups, strict=True))
        headers, places = {}, {}
        for file, group in files.items():
            # Wider elements first, so that each tensor is aligned to its element.
            group.sort(key=lambda name: -specs[name].dtype.itemsize)
            headers[file], offsets = header_of([(name, *specs[name]) for name in group], metadata=True)
            places.update({name: (file, offset) for name, offset in zip(group, offsets, strict=True)})
        return cls(specs, files, headers, places)

    def index(self) -> str | None:
        """The text of the index; None where one file holds everything."""
        if len(self.files) == 1:
            return None
        total = sum(spec.size_bytes for spec in self.specs.values())
        weight_map = {name: self.places[name][0] for name in self.specs}
        return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"


class Files:
    """The files of an export, written anywhere."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self._layout = layout
        self._folder = folder
        self._descriptors = {file: os.open(folder / file, os.O_WRONLY) for file in layout.files}

    @staticmethod
    def create(folder: Path, layout: Layout, config: str | None) -> None:
        """Everything but the values."""
        for file, names in layout.files.items():
            size_bytes = len(layout.headers[file]) + sum(layout.specs[name].size_bytes for name in names)
            with (folder / file).open("xb") as opened:
                opened.write(layout.headers[file])
                opened.truncate(size_bytes)
        for name, text in ((_INDEX, layout.index()), ("config.json", config)):
            if text is not None:
                (folder / name).write_text(text)

    def put(self, name: str, elements: Span, values: torch.Tensor) -> None:
        """Write some elements of a tensor, rounded to its dtype."""
        file, offset = self._layout.places[name]
        dtype = self._layout.specs[name].dtype
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


def export(engine: Engine, folder: Path, dtype: torch.dtype | None, max_bytes: int) -> None:
    """See `Engine.export`."""
    comm = engine.comm
    specs, buffers = {}, persistent_buffers(engine.module)
    units = {name: unit for unit in engine.units for name in unit.names}
    for name, _ in engine.module.named_parameters():
        unit = units[name]
        specs[name] = _spec(unit.weights.policy.weight_dtype, unit.layout.slot(name).spec.shape, dtype)
    specs.update({name: Spec(buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers.items()})
    layout = Layout.build(specs, max_bytes)
    draft = first(comm, lambda: _begin(folder, layout, config_text(engine.module)))

    def write() -> None:
        with Files(draft, layout) as files:
            for name, elements, values in _owned(engine):
                files.put(name, elements, values)
            for name, buffer in buffers.items() if comm.rank == 0 else ():
                files.put(name, Span(0, buffer.numel()), buffer)

    try:
        together(comm, write)
        first(comm, lambda: _end(draft, folder))
    except BaseException:
        if comm.rank == 0:  # the others cannot know whether it is getting its name just now
            shutil.rmtree(draft, ignore_errors=True)
        raise


def export_checkpoint(
    source: Path, folder: Path, dtype: torch.dtype | None = None, max_bytes: int = MAX_FILE_BYTES, tag: str = LATEST
) -> Path:
    """Export a checkpoint without an engine, on any machine; the checkpoint that was taken.

    `source` is a checkpoint or a folder of them, of which `tag` names one. Every byte that is read is verified.
    """
    path = candidates(source, tag, fallback=False)[0]
    manifest = read_manifest(path)
    keys = {name: f"{MASTER}/{name}" for name in manifest.params}
    keys |= {key.removeprefix("buffer/"): key for key in manifest.tensors if key.startswith("buffer/")}
    specs = {}
    for name, key in keys.items():
        stored = manifest.tensors[key]
        param = manifest.params.get(name)
        kept = dtype_named(param.compute) if param is not None else stored.torch_dtype
        specs[name] = _spec(kept, stored.shape, dtype if param is not None else None)
    layout = Layout.build(specs, max_bytes)
    draft = _begin(folder, layout, manifest.config)

    def write() -> None:
        with Reader(path, manifest) as reader, Files(draft, layout) as files:
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
    """What `shardwise export` does; one line about it."""
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: take one of {', '.join(DTYPES)}")
    try:
        max_bytes = parse_bytes(max_file)
    except ValueError as error:
        raise ConfigError(f"--max-file {max_file}: {error}") from None
    path = export_checkpoint(source, folder, DTYPES[dtype] if dtype is not None else None, max_bytes, tag)
    written = [file for file in folder.iterdir() if file.suffix == ".safetensors"]
    size = format_bytes(sum(file.stat().st_size for file in written))
    return f"exported {path} to {folder}: {len(written)} file{'s' if len(written) > 1 else ''}, {size}"


def _owned(engine: Engine) -> Iterator[tuple[str, Span, torch.Tensor]]:
    """The weights that this rank owns in the layout, a few MB at a time."""
    for unit in engine.units:
        mine = unit.layout.shard(engine.comm.rank)
        for held in state_views(unit, None):
            for slot, part in overlaps(unit, held.span.intersect(mine)):
                for chunk in chunks(part, held.dtype.itemsize):
                    yield slot.spec.name, chunk.shift(-slot.span.start), held.read(chunk)


def _spec(kept: torch.dtype, shape: tuple[int, ...], wanted: torch.dtype | None) -> Spec:
    return Spec(wanted if wanted is not None and kept.is_floating_point else kept, shape)


def _begin(folder: Path, layout: Layout, config: str | None) -> Path:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not an empty folder: export to a new one, or remove it first")
    draft = folder.parent / f".tmp-export-{folder.name}-{os.urandom(4).hex()}"
    with writing(folder):
        draft.mkdir(parents=True)
        try:
            Files.create(draft, layout, config)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    return draft


def _end(draft: Path, folder: Path) -> None:
    with writing(folder):
        sync_folder(draft)
        os.rename(draft, folder)
        sync_folder(folder.parent)
