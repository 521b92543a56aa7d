"""The header of a safetensors file: where its tensors lie. safetensors itself reads tensors, but names no places."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from shardwise.errors import CheckpointError

_MOST_HEADER_BYTES = 1 << 28
DTYPES = {
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""The dtypes by their names in these files."""


class HeaderEntry(NamedTuple):
    """A tensor in a file: its dtype there, and its first byte."""

    dtype: str
    start: int

    def is_of(self, dtype: torch.dtype) -> bool:
        return DTYPES.get(self.dtype) == dtype


def read_header(path: Path) -> Mapping[str, HeaderEntry]:
    """The tensors of a safetensors file. A CheckpointError if it is not one, or is cut short."""
    remedy = "copy it again, or download it again"
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _MOST_HEADER_BYTES):
                raise CheckpointError(f"{path} has no safetensors header of the length that it begins with: {remedy}")
            header = json.loads(file.read(length))
            tensors = {name: value for name, value in header.items() if name != "__metadata__"}
            found = {
                name: HeaderEntry(str(value["dtype"]), 8 + length + int(value["data_offsets"][0]))
                for name, value in tensors.items()
            }
            end = 8 + length + max((int(value["data_offsets"][1]) for value in tensors.values()), default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} has no valid safetensors header ({error}): {remedy}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): {remedy}") from None
    if size < end:
        raise CheckpointError(f"{path} is cut short: it has {size} of the {end} bytes that its header names: {remedy}")
    return found
