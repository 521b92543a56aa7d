"""Values as JSON and tensors, and back. Nothing is pickled, so no code runs when a checkpoint is read.

None, booleans, numbers, strings, lists, tuples, dictionaries (keys: strings and numbers) and tensors are restored
exactly; numpy's numbers and arrays become Python's numbers and tensors. The states of the random number generators
are such values.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

from shardwise.errors import CheckpointError, DamagedError
from shardwise.tensors import dtype_name

REMEDY = "load another checkpoint, with its tag or with fallback=True"
"""What to do about a checkpoint that is damaged."""
# A dictionary whose only key is one of these encodes another type.
_TUPLE, _DICT, _COUNTER, _FLOAT, _TENSOR, _SCALAR = "$tuple", "$dict", "$counter", "$float", "$tensor", "$scalar"


def to_plain(value: Any, tensors: MutableMapping[str, torch.Tensor], where: str) -> Any:
    """`value` as JSON can hold it; its tensors go into `tensors`, under keys that begin with `where`."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: str(float(value))}
    if isinstance(value, torch.Tensor | np.ndarray):
        return _tensor(torch.as_tensor(value).detach(), tensors, where)
    if isinstance(value, list | tuple):
        items = [to_plain(item, tensors, f"{where}/{index}") for index, item in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        return _mapping(value, tensors, where)
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: give numbers, strings, lists, "
        "dictionaries and tensors, such as the object's state_dict()"
    )


def from_plain(value: Any, fetch: Callable[[str], torch.Tensor]) -> Any:
    """The value that `to_plain` encoded; `fetch` returns the tensor of a key. A DamagedError if it encoded no such
    value."""
    try:
        return _decoded(value, fetch)
    except CheckpointError:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError) as error:
        raise DamagedError(f"a value is not as shardwise writes it ({error}): {REMEDY}") from None


def _decoded(value: Any, fetch: Callable[[str], torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, fetch) for item in value]
    if not isinstance(value, dict):
        return value
    tag, content = next(iter(value.items())) if len(value) == 1 else (None, None)
    if tag == _TUPLE:
        return tuple(_decoded(_listed(content), fetch))
    if tag in (_DICT, _COUNTER):
        pairs = {key: _decoded(item, fetch) for key, item in _listed(content)}
        if tag == _COUNTER and not all(isinstance(count, int) for count in pairs.values()):
            raise TypeError(f"expected whole numbers, found {content!r}")
        return Counter(pairs) if tag == _COUNTER else pairs
    if tag == _FLOAT:
        return float(str(content))
    if tag == _TENSOR:
        return fetch(str(content))
    if tag == _SCALAR:
        name, number = _listed(content)
        return torch.tensor(_decoded(number, fetch), dtype=dtype_named(name))
    return {key: _decoded(item, fetch) for key, item in value.items()}


def scalar_dtype(value: Any) -> str | None:
    """The dtype of a plain value that encodes a tensor of no dimensions, such as the step of torch's optimizers."""
    content = value.get(_SCALAR) if isinstance(value, dict) else None
    return str(content[0]) if isinstance(content, list) and content else None


def _listed(content: Any) -> list[Any]:
    if not isinstance(content, list):
        raise TypeError(f"expected a list, found {content!r}")
    return content


def dtype_named(name: str) -> torch.dtype:
    """The dtype with this name, such as `float32`."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"this version of torch has no dtype {name!r}: use one that has it, or load another one")
    return dtype


def rng_states(device: torch.device) -> dict[str, Any]:
    """The states of torch's (CPU and `device`), Python's and numpy's generators, as values that `to_plain` takes."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    kind, keys, *rest = np.random.get_state()
    if kind == "MT19937":
        states["numpy"] = [torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest]
    return states


def set_rng_states(states: dict[str, Any], device: torch.device) -> None:
    """Reset the generators to the states that `rng_states` returned."""
    torch.set_rng_state(states["torch"])
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    if "numpy" in states:
        keys, *rest = states["numpy"]
        np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))


def _tensor(value: torch.Tensor, tensors: MutableMapping[str, torch.Tensor], where: str) -> Any:
    if value.ndim == 0 and not value.is_complex():
        return {_SCALAR: [dtype_name(value.dtype), to_plain(value.item(), tensors, where)]}
    tensors[where] = value
    return {_TENSOR: where}


def _mapping(value: Mapping[Any, Any], tensors: MutableMapping[str, torch.Tensor], where: str) -> Any:
    for key in value:
        if not isinstance(key, str | int | float):
            raise CheckpointError(f"{where} has the key {key!r}, a {type(key).__name__}: use strings or numbers")
    plain = {key: to_plain(item, tensors, f"{where}/{key}") for key, item in value.items()}
    is_counter = isinstance(value, Counter)
    if not is_counter and all(isinstance(key, str) and not key.startswith("$") for key in value):
        return plain
    return {_COUNTER if is_counter else _DICT: [[key, item] for key, item in plain.items()]}
