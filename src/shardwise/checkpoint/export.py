"""Export of the weights in Hugging Face's layout: safetensors with an index.

The position of every tensor follows from the shapes, so each rank writes the elements that it owns straight into place,
cast on the way. Nothing is gathered, and a rank needs a few MB besides its shard
(test_load_and_export_need_little_beside_what_is_there).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.checkpointable import ModelParts, on_all_ranks, on_rank_0, slots_of
from shardwise.checkpoint.contents import owned_slices
from shardwise.checkpoint.files import CheckpointReader, TensorSlice, as_bytes
from shardwise.checkpoint.folder import LATEST, candidates, writing
from shardwise.checkpoint.hub_folder import (
    CONFIG,
    PREFIX,
    TOKENIZER,
    ExportLayout,
    adapted_layers,
    adapter_names,
    base_of,
    check_merge,
    companions,
    companions_in,
    has_adapters,
    merged_tensors,
    save_adapters,
    underlying,
    underlying_names,
    unloaded,
)
from shardwise.checkpoint.manifest import read_manifest
from shardwise.checkpoint.object_store import locate
from shardwise.checkpoint.plain import REMEDY, dtype_named
from shardwise.checkpoint.storage import Location, sync_folder
from shardwise.checks import check_range
from shardwise.comm.model_group import Everyone
from shardwise.errors import CheckpointError, ConfigError, DamagedError
from shardwise.files import parse_json, validated
from shardwise.optim.states import PARAM
from shardwise.partition.layout import Span
from shardwise.partition.policy import DTYPES
from shardwise.partition.stored import is_quantized
from shardwise.sizes import format_bytes, parse_bytes
from shardwise.unit.unit import Unit

TensorParts = Iterable[tuple[str, Span, torch.Tensor]]
"""Parts of tensors: the exported name of each, its elements, and their values."""
MAX_FILE_BYTES = 5_000_000_000


class ExportSource:
    """The tensors of a model, as an export of the model inside all wrappers has them.

    names     the exported name of each tensor that is written as it is, by its key in checkpoints
    tensors   all exported tensors, without values
    layers    the layers whose adapters are merged first, by their path in the exported model
    """

    def __init__(self, model: ModelParts, dtype: torch.dtype | None, merges: bool) -> None:
        self._model = model
        slots = {key: slot for engine in model.engines for key, slot in slots_of(engine).items()}
        self._units = {key: (unit, slot.spec.name) for key, (unit, slot) in slots.items()}
        self._whole: tuple[Unit, torch.Tensor] | None = None
        self.layers: dict[str, nn.Module] = {}
        self.kinds: dict[str, torch.Tensor] = {}
        keys = {key: f"{PARAM}/{name}" for key, (_, name) in self._units.items()}
        for unit, slot in slots.values():
            if slot.spec.name not in model.tied:
                default = unit.weights.policy.weight_dtype
                self.kinds[f"{PARAM}/{slot.spec.name}"] = _exported(default, slot.spec.whole_shape, dtype)
        for name, buffer in model.buffers.items():
            keys[id(buffer)] = f"buffer/{name}"
            self.kinds[f"buffer/{name}"] = _exported(buffer.dtype, tuple(buffer.shape), None)
        self._first = set(self.kinds) if model.everyone.rank == 0 or model.pp > 1 else set()
        if model.pp > 1:
            self._add_other_stages()
        inside = underlying_names([_name(key) for key in self.kinds])
        self.names = {key: inside[_name(key)] for key in self.kinds}
        merged = self._leave_out_layers(keys) if merges else {}
        written = self.names | merged
        self.tensors = {written[key]: tensor for key, tensor in self.kinds.items() if key in written}

    def _add_other_stages(self) -> None:
        """Add the tensors of other stages, in the model's order, and find those that this rank is the first to have. A
        collective."""
        everyone = self._model.everyone.share_object(self.kinds, "export, tensors")
        self._first -= {key for kinds in everyone[: self._model.everyone.rank] for key in kinds}
        places = {name: place for place, name in enumerate(self._model.names)}
        kinds = {key: kind for each in everyone for key, kind in each.items()}
        self.kinds = dict(sorted(kinds.items(), key=lambda item: places[_name(item[0])]))

    def parts(self) -> TensorParts:
        """This rank's parts of all tensors. A collective if adapters are merged."""
        for each in self._slices():
            if each.key in self.names:
                yield from ((self.names[each.key], *part) for part in each.parts_in_order())
        for path, layer in self.layers.items():
            for name, tensor in merged_tensors(layer, self._whole_of):
                if self._model.everyone.rank == 0 and f"{path}.{name}" in self.tensors:
                    yield f"{path}.{name}", Span(0, tensor.numel()), tensor.reshape(-1)
        self._whole = None

    def gathered(self, keys: Collection[str]) -> dict[str, torch.Tensor]:
        """The whole values of a few tensors, in their exported dtype, by key. A collective."""
        mine = [
            (each.key, elements, values.to(self.kinds[each.key].dtype).cpu())
            for each in self._slices()
            if each.key in keys
            for elements, values in each.parts_in_order()
        ]
        found = {key: torch.empty_like(self.kinds[key], device="cpu") for key in keys}
        for parts in self._model.everyone.share_object(mine, "export, adapters"):
            for key, elements, values in parts:
                found[key].view(-1)[elements.slice] = values
        return found

    def _slices(self) -> Iterator[TensorSlice]:
        for engine in self._model.engines:
            yield from owned_slices(engine, None, tied=self._model.tied)
        for name, buffer in self._model.buffers.items():
            if f"buffer/{name}" in self._first:
                yield TensorSlice.whole(f"buffer/{name}", buffer)

    def _leave_out_layers(self, keys: Mapping[int, str]) -> dict[str, str]:
        """Take the layers that have adapters out of `names`, and PEFT's prefix off the others; returns the exported
        names of those layers' own tensors, by key."""
        base = base_of(underlying(self._model.first.module))
        self.layers = {underlying_names([path])[path]: layer for path, layer in adapted_layers(base).items()}
        inside = tuple(f"{path}." for path in self.layers)
        names = {key: name.removeprefix(PREFIX) for key, name in self.names.items()}
        self.names = {key: name for key, name in names.items() if not name.startswith(inside)}
        return {
            keys[id(tensor)]: f"{path}.{name}"
            for path, layer in self.layers.items()
            for name, tensor in unloaded(layer).state_dict(keep_vars=True).items()
        }

    def _whole_of(self, param: nn.Parameter) -> torch.Tensor:
        """A parameter's whole values, in fp32 at least, in which adapters are merged. A collective."""
        unit, name = self._units[id(param)]
        if self._whole is None or self._whole[0] is not unit:
            unit.finish_update()
            self._whole = unit, unit.weights.whole(unit.weights.master)
        values = unit.whole(self._whole[1], name)
        wide = torch.promote_types(values.dtype, torch.float32) if values.is_floating_point() else values.dtype
        return values.to(wide, copy=True)


def export(
    model: ModelParts,
    folder: str | Path,
    dtype: torch.dtype | None,
    max_bytes: int,
    merged: bool = False,
    files_from: Path | None = None,
) -> None:
    """Write a model's weights into the new folder `folder`. See `Engine.export`. A collective."""
    module, everyone, folder = model.first.module, model.everyone, _local(folder)
    inner = underlying(module)
    is_adapted = has_adapters(inner)
    on_all_ranks(everyone, lambda: check_merge(inner) if is_adapted and merged else None)
    if is_adapted and model.pp > 1:
        raise CheckpointError(
            "the model has adapters of PEFT, which only PEFT can write, from a whole model: save a checkpoint of the "
            "pipeline, load it into shardwise.initialize(model, ...), and export from there"
        )
    for engine in model.engines if merged or not is_adapted else ():
        _check_not_quantized(engine.module)
    source = ExportSource(model, dtype, is_adapted and merged)
    files = on_rank_0(everyone, lambda: companions(module, files_from))
    if is_adapted and not merged:
        _export_adapters(source, everyone, folder, inner, files)
    else:
        _export(everyone, folder, ExportLayout(source.tensors, max_bytes), files, source.parts())


def _check_not_quantized(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if is_quantized(param):
            raise CheckpointError(
                f"{name!r} is quantised ({type(param).__name__}), and only the library that quantised it can write it: "
                "export the adapters alone (without merged=True), or call model.save_pretrained within "
                "shardwise.gathered(model.parameters())"
            )


def _export_adapters(
    source: ExportSource, comm: Everyone, folder: Path, model: nn.Module, files: Mapping[str, bytes]
) -> None:
    """Write the adapters and, beside them, the files of the tokenizer."""
    without_values = {source.names[key]: tensor for key, tensor in source.kinds.items()}
    names = on_rank_0(comm, lambda: adapter_names(model, without_values))
    values = source.gathered([key for key in source.kinds if source.names[key] in names])
    tokenizer = {name: content for name, content in files.items() if name in TOKENIZER}
    draft = on_rank_0(comm, lambda: _begin(folder, None, tokenizer))
    with _discarding(draft, comm):
        # PEFT looks at all names to tell those of other adapters.
        state = without_values | {source.names[key]: value for key, value in values.items()}
        on_rank_0(comm, lambda: _save_adapters(model, state, draft))
        on_rank_0(comm, lambda: _end(draft, folder))


def _save_adapters(model: nn.Module, state: dict[str, torch.Tensor], draft: Path) -> None:
    with writing(draft):
        save_adapters(model, state, draft)
        for path in draft.rglob("*"):
            sync_folder(path)


def export_checkpoint(
    source: str | Location,
    folder: str | Path,
    dtype: torch.dtype | None = None,
    max_bytes: int = MAX_FILE_BYTES,
    tag: str = LATEST,
    files_from: Path | None = None,
) -> Location:
    """Export a checkpoint without an engine, on any machine; returns the checkpoint's path.

    `source` is a checkpoint or a folder of checkpoints, of which `tag` names one. Every byte that is read is verified.
    """
    folder, path = _local(folder), candidates(locate(source), tag, fallback=False)[0]
    manifest = read_manifest(path)
    computes = {f"{PARAM}/{name}": dtype_named(param.compute) for name, param in manifest.params.items()}
    stored = {key: manifest.tensors[key] for key in computes}
    stored |= {key: tensor for key, tensor in manifest.tensors.items() if key.startswith("buffer/")}
    inside = underlying_names([_name(key) for key in stored])
    if any(name.startswith(PREFIX) or ".lora_" in name for name in inside.values()):
        raise CheckpointError(
            f"{path} is of a model with adapters of PEFT, which only PEFT can write: load it into an engine and call "
            "engine.export(folder), or engine.export(folder, merged=True)"
        )
    if manifest.left_out:
        raise CheckpointError(
            f"{path} was saved without {len(manifest.left_out)} frozen parameters: load it into an engine, whose model "
            "has them, and call engine.export(folder)"
        )
    tensors = {
        inside[_name(key)]: _exported(
            computes.get(key, tensor.torch_dtype), tensor.shape, dtype if key in computes else None
        )
        for key, tensor in stored.items()
    }
    files = companions_in(files_from) if files_from is not None else {}
    if manifest.config is not None:
        config, where = manifest.config, f"{path} (config)"
        validated(dict[str, Any], parse_json(config, where, DamagedError, REMEDY), where, DamagedError, REMEDY)
        files[CONFIG] = manifest.config.encode()
    with CheckpointReader(path, manifest) as reader:
        reader.check_headers()
        parts = (
            (inside[_name(key)], *part)
            for key, each in stored.items()
            for part in reader.parts(each, Span(0, each.numel))
        )
        _export(None, folder, ExportLayout(tensors, max_bytes), files, parts)
    return path


def _export(
    comm: Everyone | None, folder: Path, layout: ExportLayout, files: Mapping[str, bytes], parts: TensorParts
) -> None:
    """Write parts of tensors, each with its name, into a draft, and make it the folder `folder`."""
    draft = on_rank_0(comm, lambda: _begin(folder, layout, files))
    with _discarding(draft, comm):
        on_all_ranks(comm, lambda: _write(draft, layout, parts))
        on_rank_0(comm, lambda: _end(draft, folder))


@contextlib.contextmanager
def _discarding(draft: Path, comm: Everyone | None) -> Iterator[None]:
    """Within it, an error removes the draft."""
    try:
        yield
    except BaseException:
        if comm is None or comm.rank == 0:  # other ranks cannot know whether rank 0 is renaming the folder
            shutil.rmtree(draft, ignore_errors=True)
        raise


def _write(draft: Path, layout: ExportLayout, parts: TensorParts) -> None:
    """Write parts of tensors into place, each cast to its exported dtype, durably."""
    failure: CheckpointError | None = None
    with contextlib.ExitStack() as stack:
        files = {file: stack.enter_context((draft / file).open("r+b", buffering=0)) for file in layout.headers}
        for name, elements, values in parts:
            # After a failure the other parts are still made: other ranks wait for this one where adapters are merged.
            if failure is None:
                try:
                    _write_part(draft, layout, files, name, elements, values)
                except CheckpointError as error:
                    failure = error
        if failure is not None:
            raise failure
        for file, opened in files.items():
            with writing(draft / file, layout.sizes[file]):
                os.fsync(opened.fileno())


def _write_part(
    draft: Path, layout: ExportLayout, files: Mapping[str, FileIO], name: str, elements: Span, values: torch.Tensor
) -> None:
    file, offset = layout.offsets[name]
    dtype = layout.tensors[name].dtype
    data, start = as_bytes(values.to(dtype)), offset + elements.start * dtype.itemsize
    with writing(draft / file, layout.sizes[file]):
        while data:
            written = os.pwrite(files[file].fileno(), data, start)
            data, start = data[written:], start + written


def export_command(
    source: Location, folder: Path, dtype: str | None, tag: str, max_file: str, files_from: Path | None = None
) -> str:
    """Run `shardwise export`; returns one line about what was written."""
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: use one of {', '.join(DTYPES)}")
    try:
        max_bytes = parse_bytes(max_file)
    except ValueError as error:
        raise ConfigError(f"--max-file {max_file}: {error}") from None
    check_range("--max-file", max_bytes, least=1)
    path = export_checkpoint(source, folder, DTYPES[dtype] if dtype is not None else None, max_bytes, tag, files_from)
    written = [file for file in folder.iterdir() if file.suffix == ".safetensors"]
    size = format_bytes(sum(file.stat().st_size for file in written))
    return f"exported {path} to {folder}: {len(written)} file{'s' if len(written) > 1 else ''}, {size}"


def _local(folder: str | Path) -> Path:
    """A folder to export to: several ranks write into one file, which an object store does not have."""
    found = locate(folder)
    if not isinstance(found, Path):
        raise CheckpointError(f"{found} is in an object store: export into a folder, and copy it there")
    return found


def _name(key: str) -> str:
    """The name of a parameter or buffer from its key in a checkpoint."""
    return key.partition("/")[2]


def _exported(default: torch.dtype, shape: tuple[int, ...], wanted: torch.dtype | None) -> torch.Tensor:
    dtype = wanted if wanted is not None and default.is_floating_point else default
    return torch.empty(shape, dtype=dtype, device="meta")


def _begin(folder: Path, layout: ExportLayout | None, files: Mapping[str, bytes]) -> Path:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not an empty folder: export to a new one, or remove it first")
    draft = folder.parent / f".tmp-export-{folder.name}-{os.urandom(4).hex()}"
    with writing(folder), contextlib.ExitStack() as stack:
        draft.mkdir(parents=True)
        stack.callback(shutil.rmtree, draft, ignore_errors=True)
        if layout is not None:
            layout.create(draft)
        for name, content in files.items():
            with writing(draft / name, len(content)):
                (draft / name).write_bytes(content)
        stack.pop_all()
    return draft


def _end(draft: Path, folder: Path) -> None:
    # As for a checkpoint: everything is durable before the rename, so the folder is complete or absent.
    with writing(folder):
        sync_folder(draft)
        os.rename(draft, folder)
        sync_folder(folder.parent)
