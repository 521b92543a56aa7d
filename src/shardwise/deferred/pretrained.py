"""Pretrained weights in safetensors files, in Hugging Face's layout; each rank reads the rows that it needs."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from safetensors import SafetensorError, safe_open
from torch import nn

from shardwise.deferred.stored_names import stored_names
from shardwise.errors import CheckpointError
from shardwise.files import read_json
from shardwise.partition.layout import Span
from shardwise.partition.part import TensorPart

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class PretrainedWeights:
    """The tensors of one file, or of all files of a folder or an index, by name.

    With `strict`, a name that the model lacks is an error. A name that the files lack always is.
    """

    def __init__(self, path: str | os.PathLike[str], strict: bool = True) -> None:
        self.path = Path(path)
        self._strict = strict
        self._files = _files(self.path)

    @property
    def files(self) -> list[str]:
        """The paths of all files, as `PretrainedTensor` names them."""
        return list(dict.fromkeys(map(str, self._files.values())))

    def has_names_of(self, model: nn.Module) -> bool:
        """Whether every parameter of the model is stored under one of its names."""
        stored = stored_names(model, self._files)
        names: dict[int, bool] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            names[id(param)] = names.get(id(param), False) or name in stored
        return all(names.values())

    def match(self, model: nn.Module) -> dict[str, StoredTensor]:
        """The stored tensor of each parameter and buffer of the model, by its first name."""
        tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        tensors.update(model.named_buffers(remove_duplicate=False))
        stored = stored_names(model, self._files)
        if self._strict and (unexpected := [name for name in stored if name not in tensors]):
            raise CheckpointError(
                f"{self.path} has {_listing(unexpected, tensors)}, which the model does not have: give a checkpoint of "
                "this model, or pass strict=False to ignore names that the model lacks"
            )
        first_names: dict[int, str] = {}
        found: dict[str, StoredTensor] = {}
        for name, tensor in tensors.items():
            first = first_names.setdefault(id(tensor), name)  # a tied parameter may be stored under any of its names
            if first not in found and name in stored:
                found[first] = self._tensor(stored[name], tuple(tensor.shape))
                found[first].check(tensor.is_floating_point())
        if missing := [name for name, _ in model.named_parameters() if name not in found]:
            raise CheckpointError(
                f"{self.path} lacks {_listing(missing, self._files)}, which the model needs: give a checkpoint of this "
                "model"
            )
        return found

    def _tensor(self, names: tuple[str, ...], shape: tuple[int, ...]) -> StoredTensor:
        if len(names) == 1:
            return PretrainedTensor(str(self._files[names[0]]), names[0], shape)
        each = (shape[1] * shape[0] // len(names), *shape[2:])
        return StackedTensor(tuple(PretrainedTensor(str(self._files[name]), name, each) for name in names), shape)


class WeightIndex(BaseModel):
    """The index of several safetensors files: the file of each tensor."""

    weight_map: dict[str, str]


@dataclass(frozen=True)
class PretrainedTensor:
    """One tensor in a file, or the part of it that tensor parallelism gives to this rank; the origin of a parameter's
    values."""

    file: str
    name: str
    shape: tuple[int, ...]
    part: TensorPart | None = None

    def check(self, is_float: bool) -> None:
        """Raise a CheckpointError if the file has another shape, or integers instead of floating-point numbers."""
        try:
            found = _opened(self.file).get_slice(self.name)
        except SafetensorError:
            raise CheckpointError(
                f"{self.file} does not have {self.name!r}, though its index names it: copy the folder again"
            ) from None
        if self.shape != (seen := tuple(found.get_shape())):
            raise CheckpointError(f"{self.name!r} has shape {seen} in {self.file}, but {self.shape} in the model")
        if is_float != ("F" in (dtype := str(found.get_dtype()))):
            kind = "floating-point numbers" if is_float else "integers"
            raise CheckpointError(f"{self.name!r} has dtype {dtype} in {self.file}, and the model needs {kind}")

    def located(self, part: Span) -> Iterator[tuple[PretrainedTensor, Span]]:
        """The tensors of files, each with its elements, that the flat elements `part` are."""
        yield self, part

    def read(self, part: Span) -> torch.Tensor:
        """The flat elements `part`; reads only the rows that contain them."""
        if not self.shape:
            return self.whole().reshape(-1)[part.slice]
        tp = self.part or TensorPart(self.shape)
        row = max(1, torch.Size(tp.local_shape[1:]).numel())
        first, end = part.start // row, -(-part.stop // row)
        above = tp.offset if tp.dim == 0 else 0
        ranges = [slice(first + above, end + above), *(slice(0, size) for size in self.shape[1:])]
        if tp.dim:
            ranges[tp.dim] = slice(tp.offset, tp.offset + tp.size)
        rows: torch.Tensor = _opened(self.file).get_slice(self.name)[tuple(ranges)]
        return rows.reshape(-1)[part.shift(-first * row).slice]

    def __call__(self, part: Span) -> torch.Tensor:
        return self.read(part)

    def whole(self) -> torch.Tensor:
        return _opened(self.file).get_tensor(self.name)  # type: ignore[no-any-return]  # safetensors


@dataclass(frozen=True)
class StackedTensor:
    """Tensors of equal shape one after the other, as the experts of a layer; the origin of a parameter's values."""

    tensors: tuple[PretrainedTensor, ...]
    shape: tuple[int, ...]
    part: TensorPart | None = None

    def check(self, is_float: bool) -> None:
        """As of a `PretrainedTensor`."""
        for tensor in self.tensors:
            tensor.check(is_float)

    def located(self, part: Span) -> Iterator[tuple[PretrainedTensor, Span]]:
        """As of a `PretrainedTensor`."""
        each = torch.Size(self.tensors[0].shape).numel()
        for number, tensor in enumerate(self.tensors):
            if inside := part.intersect(Span(number * each, (number + 1) * each)):
                yield tensor, inside.shift(-number * each)

    def __call__(self, part: Span) -> torch.Tensor:
        if self.part is not None and self.part.dim is not None:
            raise CheckpointError(
                f"{self.tensors[0].name!r} and {len(self.tensors) - 1} more are one parameter of the model, which "
                "tensor parallelism cuts: load the model with transformers, save it under the names of its own "
                "parameters with safetensors, and give that file"
            )
        return torch.cat([tensor.read(inside) for tensor, inside in self.located(part)])

    def whole(self) -> torch.Tensor:
        return self(Span(0, torch.Size(self.shape).numel())).view(self.shape)


StoredTensor = PretrainedTensor | StackedTensor


@cache
def _opened(file: str) -> Any:
    """A mapped file, which stays open for its next tensor until `close_files`."""
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file} cannot be read as safetensors ({error}): copy it again, or download it again"
        ) from error


close_files = _opened.cache_clear
"""Close the files that were read."""


def _files(path: Path) -> dict[str, Path]:
    """The file of each tensor, by name."""
    if path.is_dir():
        usual = [path / name for name in (_INDEX, _SINGLE) if (path / name).is_file()]
        inside = usual[:1] or sorted(path.glob("*.safetensors"))
        if not inside:
            raise CheckpointError(f"{path} holds neither {_INDEX} nor a .safetensors file")
        return {name: file for one in inside for name, file in _files(one).items()}
    if not path.is_file():
        raise CheckpointError(f"there is no {path}: give a .safetensors file, its index, or the folder of either")
    if path.suffix == ".json":
        return _indexed(path)
    return dict.fromkeys(_opened(str(path)).keys(), path)


def _indexed(index: Path) -> dict[str, Path]:
    found = read_json(
        index, WeightIndex, CheckpointError, "it is not an index of safetensors files, a JSON object with a weight_map"
    )
    files = {name: index.parent / file for name, file in found.weight_map.items()}
    for file in set(files.values()):
        if file.parent != index.parent or not file.is_file():
            raise CheckpointError(f"{index} names {str(file.name)!r}, which is not a file beside it")
    return files


def _listing(names: list[str], valid: Iterable[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    near = difflib.get_close_matches(names[0], list(valid), n=1, cutoff=0.4)
    return f"{names[0]!r}{more}" + (f" (nearest: {near[0]!r})" if near else "")
