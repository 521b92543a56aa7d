"""Pretrained weights in safetensors files, in Hugging Face's layout; each rank reads the rows that it needs."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from shardwise.partition.layout import Span

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class PretrainedWeights:
    """The tensors of one file, or of all files of a folder or an index, by name.

    With `strict`, a name that the model lacks is an error. A name that the files lack always is.
    """

    def __init__(self, path: str | os.PathLike[str], strict: bool = True) -> None:
        self.path = Path(path)
        self._strict = strict
        self._files = _files(self.path)

    def match(self, model: nn.Module) -> dict[str, PretrainedTensor]:
        """The stored tensor of each parameter and buffer of the model, by its first name."""
        tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        tensors.update(model.named_buffers(remove_duplicate=False))
        if self._strict and (unexpected := [name for name in self._files if name not in tensors]):
            raise ValueError(
                f"{self.path} has {_listing(unexpected, tensors)}, which the model does not have: give a checkpoint of "
                "this model, or pass strict=False to ignore names that the model lacks"
            )
        first_names: dict[int, str] = {}
        found: dict[str, PretrainedTensor] = {}
        for name, tensor in tensors.items():
            first = first_names.setdefault(id(tensor), name)  # a tied parameter may be stored under any of its names
            if first not in found and name in self._files:
                found[first] = PretrainedTensor(str(self._files[name]), name, tuple(tensor.shape))
                found[first].check()
        if missing := [name for name, _ in model.named_parameters() if name not in found]:
            raise ValueError(f"{self.path} lacks {_listing(missing, self._files)}, which the model needs")
        return found


@dataclass(frozen=True)
class PretrainedTensor:
    """One tensor in a file; the origin of a parameter's values."""

    file: str
    name: str
    shape: tuple[int, ...]

    def check(self) -> None:
        """Raise a ValueError if the file has another shape."""
        if self.shape != (seen := tuple(_opened(self.file).get_slice(self.name).get_shape())):
            raise ValueError(f"{self.name!r} has shape {seen} in {self.file}, but {self.shape} in the model")

    def read(self, part: Span) -> torch.Tensor:
        """The flat elements `part`; reads only the rows that contain them."""
        if not self.shape:
            return self.whole().reshape(-1)[part.slice]
        row = max(1, torch.Size(self.shape[1:]).numel())
        first, end = part.start // row, -(-part.stop // row)
        rows: torch.Tensor = _opened(self.file).get_slice(self.name)[first:end]
        return rows.reshape(-1)[part.shift(-first * row).slice]

    def whole(self) -> torch.Tensor:
        return _opened(self.file).get_tensor(self.name)  # type: ignore[no-any-return]  # safetensors


@cache
def _opened(file: str) -> Any:
    """A mapped file, which stays open for its next tensor until `close_files`."""
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} cannot be read as safetensors: {error}") from error


close_files = _opened.cache_clear
"""Close the files that were read."""


def _files(path: Path) -> dict[str, Path]:
    """The file of each tensor, by name."""
    if path.is_dir():
        usual = [path / name for name in (_INDEX, _SINGLE) if (path / name).is_file()]
        inside = usual[:1] or sorted(path.glob("*.safetensors"))
        if not inside:
            raise ValueError(f"{path} holds neither {_INDEX} nor a .safetensors file")
        return {name: file for one in inside for name, file in _files(one).items()}
    if not path.is_file():
        raise ValueError(f"there is no {path}: give a .safetensors file, its index, or the folder of either")
    if path.suffix == ".json":
        return _indexed(path)
    return dict.fromkeys(_opened(str(path)).keys(), path)


def _indexed(index: Path) -> dict[str, Path]:
    try:
        names = json.loads(index.read_text())["weight_map"]
        files = {str(name): index.parent / str(file) for name, file in names.items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index} is not an index of safetensors files (a JSON object with a weight_map)") from error
    for file in set(files.values()):
        if file.parent != index.parent or not file.is_file():
            raise ValueError(f"{index} names {str(file.name)!r}, which is not a file beside it")
    return files


def _listing(names: list[str], valid: Iterable[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    near = difflib.get_close_matches(names[0], list(valid), n=1, cutoff=0.4)
    return f"{names[0]!r}{more}" + (f" (nearest: {near[0]!r})" if near else "")
