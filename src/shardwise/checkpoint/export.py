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
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path

import torch

from shardwise.checkpoint.checkpointable import (
    Checkpointable,
    config_text,
    on_all_ranks,
    on_rank_0,
    owned_slices,
    persistent_buffers,
)
from shardwise.checkpoint.files import CheckpointReader, TensorSlice, as_bytes, header_of
from shardwise.checkpoint.folder import LATEST, candidates, sync_folder, writing
from shardwise.checkpoint.manifest import read_manifest
from shardwise.checkpoint.plain import dtype_named
from shardwise.comm.comm import Comm
from shardwise.errors import CheckpointError, ConfigError
from shardwise.optim.states import MASTER
from shardwise.partition.layout import Span
from shardwise.partition.policy import DTYPES
from shardwise.sizes import format_bytes, parse_bytes

TensorParts = Iterable[tuple[str, Span, torch.Tensor]]
"""Parts of tensors: the key of each, its elements, and their values."""
MAX_FILE_BYTES = 5_000_000_000
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class ExportLayout:
    """Which tensors go into which file, in their order, each file as full as `max_bytes` allows.

    tensors   without values, in the dtype and shape in which they are exported
    headers   the header of each file
    offsets   the file of each tensor, and where its bytes begin in it
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], max_bytes: int) -> None:
        groups: list[list[str]] = [[]]
        size_bytes = 0
        for name, tensor in tensors.items():
            if groups[-1] and size_bytes + tensor.nbytes > max_bytes:
                groups.append([])
                size_bytes = 0
            groups[-1].append(name)
            size_bytes += tensor.nbytes
        count = len(groups)
        self.tensors = tensors
        self.headers: dict[str, bytes] = {}
        self.offsets: dict[str, tuple[str, int]] = {}
        for number, group in enumerate(groups, 1):
            file = f"model-{number:05d}-of-{count:05d}.safetensors" if count > 1 else _SINGLE
            facts = [(name, tensors[name].dtype, tensors[name].shape) for name in group]
            self.headers[file], starts = header_of(facts, metadata=True)
            self.offsets.update({name: (file, start) for name, start in zip(group, starts, strict=True)})

    def create(self, folder: Path) -> None:
        """Create the files in their full size, with everything except the values, and the index of several."""
        sizes = {file: len(header) for file, header in self.headers.items()}
        for name, (file, _) in self.offsets.items():
            sizes[file] += self.tensors[name].nbytes
        for file, header in self.headers.items():
            (folder / file).write_bytes(header)
            os.truncate(folder / file, sizes[file])
        if len(self.headers) > 1:
            total = sum(tensor.nbytes for tensor in self.tensors.values())
            weight_map = {name: self.offsets[name][0] for name in self.tensors}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def export(engine: Checkpointable, folder: Path, dtype: torch.dtype | None, max_bytes: int) -> None:
    """Write an engine's weights into the new folder `folder`. See `Engine.export`. A collective."""
    buffers = persistent_buffers(engine.module)
    units = {name: unit for unit in engine.units for name in unit.names}
    tensors = {
        name: _exported(units[name].weights.policy.weight_dtype, units[name].layout.slot(name).spec.shape, dtype)
        for name, _ in engine.module.named_parameters()
    }
    tensors |= {name: _exported(buffer.dtype, tuple(buffer.shape), None) for name, buffer in buffers.items()}
    slices = owned_slices(engine, None)
    if engine.comm.rank == 0:
        slices = chain(slices, (TensorSlice.whole(f"buffer/{name}", buffer) for name, buffer in buffers.items()))
    parts = ((each.key, *part) for each in slices for part in each.parts())
    _export(engine.comm, folder, ExportLayout(tensors, max_bytes), config_text(engine.module), parts)


def export_checkpoint(
    source: Path, folder: Path, dtype: torch.dtype | None = None, max_bytes: int = MAX_FILE_BYTES, tag: str = LATEST
) -> Path:
    """Export a checkpoint without an engine, on any machine; returns the checkpoint's path.

    `source` is a checkpoint or a folder of checkpoints, of which `tag` names one. Every byte that is read is verified.
    """
    path = candidates(source, tag, fallback=False)[0]
    manifest = read_manifest(path)
    computes = {f"{MASTER}/{name}": dtype_named(param.compute) for name, param in manifest.params.items()}
    stored = {key: manifest.tensors[key] for key in computes}
    stored |= {key: tensor for key, tensor in manifest.tensors.items() if key.startswith("buffer/")}
    tensors = {
        _name(key): _exported(computes.get(key, tensor.torch_dtype), tensor.shape, dtype if key in computes else None)
        for key, tensor in stored.items()
    }
    with CheckpointReader(path, manifest) as reader:
        reader.check_headers()
        parts = ((key, *part) for key, each in stored.items() for part in reader.parts(each, Span(0, each.numel)))
        _export(None, folder, ExportLayout(tensors, max_bytes), manifest.config, parts)
    return path


def _export(comm: Comm | None, folder: Path, layout: ExportLayout, config: str | None, parts: TensorParts) -> None:
    """Write parts of tensors, each with its key, into a draft, and make it the folder `folder`."""
    draft = on_rank_0(comm, lambda: _begin(folder, layout, config))
    try:
        on_all_ranks(comm, lambda: _write(draft, layout, parts))
        on_rank_0(comm, lambda: _end(draft, folder))
    except BaseException:
        if comm is None or comm.rank == 0:  # other ranks cannot know whether rank 0 is renaming the folder
            shutil.rmtree(draft, ignore_errors=True)
        raise


def _write(draft: Path, layout: ExportLayout, parts: TensorParts) -> None:
    """Write parts of tensors into place, each cast to its exported dtype, durably."""
    with contextlib.ExitStack() as stack:
        files = {file: stack.enter_context((draft / file).open("r+b", buffering=0)) for file in layout.headers}
        for key, elements, values in parts:
            file, offset = layout.offsets[_name(key)]
            dtype = layout.tensors[_name(key)].dtype
            data, start = as_bytes(values.to(dtype)), offset + elements.start * dtype.itemsize
            with writing(draft / file):
                while data:
                    written = os.pwrite(files[file].fileno(), data, start)
                    data, start = data[written:], start + written
        with writing(draft):
            for opened in files.values():
                os.fsync(opened.fileno())


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


def _name(key: str) -> str:
    """The name of a parameter or buffer from its key in a checkpoint."""
    return key.partition("/")[2]


def _exported(default: torch.dtype, shape: tuple[int, ...], wanted: torch.dtype | None) -> torch.Tensor:
    dtype = wanted if wanted is not None and default.is_floating_point else default
    return torch.empty(shape, dtype=dtype, device="meta")


def _begin(folder: Path, layout: ExportLayout, config: str | None) -> Path:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not an empty folder: export to a new one, or remove it first")
    draft = folder.parent / f".tmp-export-{folder.name}-{os.urandom(4).hex()}"
    with writing(folder), contextlib.ExitStack() as stack:
        draft.mkdir(parents=True)
        stack.callback(shutil.rmtree, draft, ignore_errors=True)
        layout.create(draft)
        if config is not None:
            (draft / "config.json").write_text(config)
        stack.pop_all()
    return draft


def _end(draft: Path, folder: Path) -> None:
    # As for a checkpoint: everything is durable before the rename, so the folder is complete or absent.
    with writing(folder):
        sync_folder(draft)
        os.rename(draft, folder)
        sync_folder(folder.parent)
