"""Operators by form: name, shapes and dtypes, from which follow the arithmetic and the bytes of its kernel."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from shardwise.partition.policy import DTYPE_NAMES
from shardwise.tensors import dtype_name, tensors_in

_FREE = re.compile(
    r"^(empty|new_empty|detach|alias|set_|resize_|lift|_local_scalar_dense|is_same_size|_has_same_storage|_version"
    r"|_reshape_alias|_unsafe_view)"
)
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
_LOOKUPS = {"embedding", "index", "index_select", "gather"}
"""They read only as much of their first argument as they return."""
FRESH = "fresh memory"
"""The key of memory that is touched for the first time."""


@dataclass(frozen=True)
class Form:
    """One kernel, wherever it is called with arguments of the same form.

    key         names the form; kernels that were measured are found by it
    dtype       of the arithmetic
    flops       0 unless it multiplies matrices or attends
    size_bytes  what it reads and writes
    product     rows, columns and depth of a matrix product, and how many there are of them
    call        the operator and its arguments, to be run again; not part of what is stored
    """

    key: str
    dtype: str
    flops: int
    size_bytes: int
    product: tuple[int, int, int, int] | None = None
    call: Any = field(default=None, compare=False, repr=False)


class Forms:
    """The forms seen so far: each is described once."""

    def __init__(self, keeps_calls: bool = False) -> None:
        self._known: dict[Any, Form | None] = {}
        self._keeps_calls = keeps_calls

    def find(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> Form | None:
        """The form of a call; None if it runs no kernel."""
        values = (*args, *kwargs.values())
        key = (func, *map(_described, values))
        if key not in self._known:
            name = func._overloadpacket.__name__
            found = None if _FREE.match(name) else _form(name, func, args, kwargs, result)
            self._known[key] = found if found is None or self._keeps_calls else replace(found, call=None)
        return self._known[key]


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    return value if isinstance(value, (int, float, bool, str, type(None), torch.dtype)) else type(value)


def _form(name: str, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> Form | None:
    tensors, made = tensors_in(args, kwargs), tensors_in(result)
    moved = [tensor.nbytes for tensor in (tensors[1:] if name in _LOOKUPS else tensors)]
    moved += [tensor.nbytes for tensor in made]
    moved += [tensor.nbytes for tensor in made[:1] if name in _LOOKUPS]
    if not made:
        moved += [tensor.nbytes for tensor in _written(func, args)]
    if not sum(moved):
        return None
    count = flop_registry.get(func._overloadpacket)
    flops = int(count(*args, **kwargs, out_val=result)) if count is not None else 0
    dtype = next((DTYPE_NAMES[tensor.dtype] for tensor in (*tensors, *made) if tensor.dtype in DTYPE_NAMES), "fp32")
    text = " ".join(_text(value) for value in (*args, *kwargs.values()))
    return Form(f"{name} {text}", dtype, flops, sum(moved), _product(name, tensors), (func, args, dict(kwargs)))


def _product(name: str, tensors: list[torch.Tensor]) -> tuple[int, int, int, int] | None:
    if name not in _PRODUCTS:
        return None
    left, right = tensors[-2:]
    batch = left.shape[0] if left.ndim == 3 else 1
    return int(left.shape[-2]), int(right.shape[-1]), int(left.shape[-1]), int(batch)


def _written(func: Any, args: Any) -> Iterator[torch.Tensor]:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(value)


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        shape = ",".join(map(str, value.shape))
        contiguous = "" if value.is_contiguous() else "t" if value.ndim > 1 and value.mT.is_contiguous() else "s"
        return f"{DTYPE_NAMES.get(value.dtype, dtype_name(value.dtype))}[{shape}]{contiguous}"
    if isinstance(value, (list, tuple)):
        texts = [_text(each) for each in value]
        if len(texts) < 5:
            return f"({' '.join(texts)})"
        return f"({texts[0]} {len(texts)}x {zlib.crc32(' '.join(texts).encode()):x})"
    return str(value) if isinstance(value, (int, float, bool)) else ""
