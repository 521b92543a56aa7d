"""Where the tensors of an export lie: in safetensors files of limited size, with an index if there are several."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from shardwise.checkpoint.files import header_of
from shardwise.checkpoint.folder import writing

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class ExportLayout:
    """Which tensors go into which file, in their order, each file as full as `max_bytes` allows.

    tensors   without values, in the dtype and shape in which they are exported
    headers   the header of each file
    offsets   the file of each tensor, and where its bytes begin in it
    sizes     the bytes of each file
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
        self.sizes: dict[str, int] = {}
        for number, group in enumerate(groups, 1):
            file = f"model-{number:05d}-of-{count:05d}.safetensors" if count > 1 else _SINGLE
            facts = [(name, tensors[name].dtype, tensors[name].shape) for name in group]
            self.headers[file], starts = header_of(facts, metadata=True)
            self.offsets.update({name: (file, start) for name, start in zip(group, starts, strict=True)})
            self.sizes[file] = len(self.headers[file]) + sum(tensors[name].nbytes for name in group)

    def create(self, folder: Path) -> None:
        """Create the files in their full size, with everything except the values, and the index of several."""
        for file, header in self.headers.items():
            with writing(folder / file, self.sizes[file]):
                (folder / file).write_bytes(header)
                os.truncate(folder / file, self.sizes[file])
        if len(self.headers) > 1:
            total = sum(tensor.nbytes for tensor in self.tensors.values())
            weight_map = {name: self.offsets[name][0] for name in self.tensors}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
