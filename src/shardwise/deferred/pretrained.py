"""Pretrained weights in safetensors files, in Hugging Face's layout; each rank reads the rows that it needs.

transformers renames the tensors of some architectures when it loads them, and makes one parameter of several: files of
Mixtral have matrices for each expert, of which the model has one tensor for all (`stored_names`). Such a parameter is
its tensors one after the other, so that ranks still read only the rows that they need.
"""

from __future__ import annotations

import difflib
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from safetensors import SafetensorError, safe_open
from torch import nn

from shardwise.errors import CheckpointError
from shardwise.files import read_json
from shardwise.offload.safetensors_header import DTYPES
from shardwise.partition.layout import Span
from shardwise.partition.part import TensorPart

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def stored_names(model: nn.Module, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """For each name that the model may have, the `names` of the tensors that make it up, in the order of elements.

    A name that files have and the model does not stands for itself.
    """
    if not any(base.__module__.partition(".")[0] == "transformers" for base in type(model).__mro__):
        return {name: (name,) for name in names}
    return _converted(model, names)


def _converted(model: nn.Module, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """`stored_names` of a model of transformers, by its own conversions."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:  # transformers before 5
        return {name: (name,) for name in names}
    own = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
    prefix = getattr(model, "base_model_prefix", "") or None  # files of a model without a head lack it
    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    joining = [each for each in transforms if isinstance(each, WeightConverter)]
    converters = {pattern: each for each in joining for pattern in each.source_patterns}
    found: dict[str, tuple[str, ...]] = {}
    pieces: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(names, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, joining, prefix, own)
        if name in own or renamed not in own:
            found[name] = (name,)
        elif pattern is None:
            found[renamed] = (name,)
        else:
            pieces[renamed][pattern].append(name)
    for renamed, by_pattern in pieces.items():
        converter = converters[next(iter(by_pattern))]
        lists = [by_pattern[pattern] for pattern in converter.source_patterns if pattern in by_pattern]
        if _is_stacked(converter.operations, len(lists)) and len(set(map(len, lists))) == 1:
            found[renamed] = tuple(name for row in zip(*lists, strict=True) for name in row)
        else:
            found.update({name: (name,) for names in lists for name in names})
    return found


def _is_stacked(operations: list[Any], lists: int) -> bool:
    """Whether the result is the tensors one after the other: those of each list stacked, and lists joined by rows."""
    kinds = [(type(each).__name__, getattr(each, "dim", None)) for each in operations]
    return kinds == [("MergeModulelist", 0), ("Concatenate", 1)][: 1 + (lists > 1)]


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

    def unexpected(self, model: nn.Module) -> list[str]:
        """The names in the files that neither the model has, nor transformers expects not to be there."""
        own = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
        known = [re.compile(each) for each in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
        names = [name for name in stored_names(model, self._files) if name not in own]
        return [name for name in names if not any(each.search(name) for each in known)]

    @property
    def dtype(self) -> torch.dtype | None:
        """That of the first tensor of floating-point numbers."""
        kinds = (str(_opened(str(file)).get_slice(name).get_dtype()) for name, file in self._files.items())
        return next((DTYPES.get(kind) for kind in kinds if "F" in kind), None)

    def match(self, model: nn.Module) -> dict[str, PretrainedParam]:
        """The stored tensor of each parameter and buffer of the model, by its first name."""
        tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        tensors.update(model.named_buffers(remove_duplicate=False))
        stored = stored_names(model, self._files)
        if self._strict and (unexpected := [name for name in stored if name not in tensors]):
            raise CheckpointError(
                f"{self.path} has {listing(unexpected, tensors)}, which the model does not have: give a checkpoint of "
                "this model, or pass strict=False to ignore names that the model lacks"
            )
        first_names: dict[int, str] = {}
        found: dict[str, PretrainedParam] = {}
        for name, tensor in tensors.items():
            first = first_names.setdefault(id(tensor), name)  # a tied parameter may be stored under any of its names
            if name not in stored:
                continue
            here = self._param(stored[name], tuple(tensor.shape))
            here.check(tensor.is_floating_point())
            other = found.setdefault(first, here)
            if other is not here and isinstance(tensor, nn.Parameter) and not torch.equal(other.whole(), here.whole()):
                raise CheckpointError(
                    f"{self.path} has different values for {first!r} and {name!r}, which are one parameter of the "
                    "model: build the model without tying them (in config.json: tie_word_embeddings: false), or remove "
                    "one of the two from the files"
                )
        if missing := [name for name, _ in model.named_parameters() if name not in found]:
            raise CheckpointError(
                f"{self.path} lacks {listing(missing, self._files)}, which the model needs: give a checkpoint of this "
                "model"
            )
        return found

    def _param(self, names: tuple[str, ...], shape: tuple[int, ...]) -> PretrainedParam:
        each = shape if len(names) == 1 else (shape[1] * shape[0] // len(names), *shape[2:])
        return PretrainedParam(tuple(PretrainedTensor(str(self._files[name]), name, each) for name in names), shape)


class WeightIndex(BaseModel):
    """The index of several safetensors files: the file of each tensor."""

    weight_map: dict[str, str]


@dataclass(frozen=True)
class PretrainedTensor:
    """One tensor in a file."""

    file: str
    name: str
    shape: tuple[int, ...]

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

    def read(self, part: Span, tp: TensorPart | None = None) -> torch.Tensor:
        """The flat elements `part`, of the tensor or of its part `tp`; reads only the rows that contain them."""
        if not self.shape:
            scalar: torch.Tensor = _opened(self.file).get_tensor(self.name)
            return scalar.reshape(-1)[part.slice]
        tp = tp or TensorPart(self.shape)
        row = max(1, torch.Size(tp.local_shape[1:]).numel())
        first, end = part.start // row, -(-part.stop // row)
        above = tp.offset if tp.dim == 0 else 0
        ranges = [slice(first + above, end + above), *(slice(0, size) for size in self.shape[1:])]
        if tp.dim:
            ranges[tp.dim] = slice(tp.offset, tp.offset + tp.size)
        rows: torch.Tensor = _opened(self.file).get_slice(self.name)[tuple(ranges)]
        return rows.reshape(-1)[part.shift(-first * row).slice]


@dataclass(frozen=True)
class PretrainedParam:
    """What files have of a parameter: one tensor, or several of equal shape one after the other, as the experts of a
    layer. With a `part`, this rank has that part of it by tensor parallelism. It is the origin of the values."""

    tensors: tuple[PretrainedTensor, ...]
    shape: tuple[int, ...]
    part: TensorPart | None = None

    def check(self, is_float: bool) -> None:
        """As of a `PretrainedTensor`."""
        for tensor in self.tensors:
            tensor.check(is_float)

    def located(self, part: Span) -> Iterator[tuple[PretrainedTensor, Span]]:
        """The tensors of files, each with its elements, that the flat elements `part` are."""
        each = torch.Size(self.tensors[0].shape).numel()
        for number, tensor in enumerate(self.tensors):
            if inside := part.intersect(Span(number * each, (number + 1) * each)):
                yield tensor, inside.shift(-number * each)

    def __call__(self, part: Span) -> torch.Tensor:
        if len(self.tensors) == 1:
            return self.tensors[0].read(part, self.part)
        if self.part is not None and self.part.dim is not None:
            raise CheckpointError(
                f"{self.tensors[0].name!r} and {len(self.tensors) - 1} more are one parameter of the model, which "
                "tensor parallelism cuts: load the model with transformers, save it under the names of its own "
                "parameters with safetensors, and give that file"
            )
        return torch.cat([tensor.read(inside) for tensor, inside in self.located(part)])

    def whole(self) -> torch.Tensor:
        return self(Span(0, torch.Size(self.shape).numel())).view(self.shape)


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


def listing(names: list[str], valid: Iterable[str] = ()) -> str:
    """The first of some names, how many more there are, and the nearest of the valid ones."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    near = difflib.get_close_matches(names[0], list(valid), n=1, cutoff=0.4)
    return f"{names[0]!r}{more}" + (f" (nearest: {near[0]!r})" if near else "")
