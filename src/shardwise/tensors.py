"""Tensors: those inside what a module takes, returns or keeps; blanks; names of dtypes; flags on the host."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

_OPAQUE = (nn.Module, type, FunctionType, MethodType, ModuleType, str, bytes, int, float, complex, torch.dtype)
_KEPT: frozenset[Any] = frozenset((torch.Tensor, list, tuple, dict))
_KEPT_COUNT = 64  # longer lists on a module are tables, not losses
_OWN = frozenset(vars(nn.Module()))


def blank(dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """A scalar to expand to the shape of values that are not there: NaN, or 0 where the dtype has none."""
    return torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without its module, such as `float32`."""
    return str(dtype).removeprefix("torch.")


class HostFlags:
    """Flags that were decided on a device, copied to the host without waiting for them."""

    def __init__(self, flags: torch.Tensor) -> None:
        self._event = torch.cuda.Event() if flags.is_cuda else None
        self._flags = torch.empty(flags.shape, dtype=torch.bool, pin_memory=flags.is_cuda)
        self._flags.copy_(flags, non_blocking=True)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(flags.device))

    @property
    def are_here(self) -> bool:
        """Whether `wait` returns at once."""
        return self._event is None or self._event.query()

    def wait(self) -> list[bool]:
        """The flags. Waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        flags: list[bool] = self._flags.tolist()
        return flags


@contextlib.contextmanager
def outside_inference() -> Iterator[None]:
    """Within it, the user's `torch.inference_mode` is off: tensors made under it cannot be written outside of it."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextlib.contextmanager
def contiguous(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same values in one piece, for an operation that writes them; they are copied back. A collective takes memory
    from the first element on for as many bytes as there are elements, which an expanded tensor does not have."""
    if tensor.is_contiguous():
        yield tensor
        return
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
    values = tensor.contiguous()
    yield values
    tensor.copy_(values)


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """Every tensor in nested lists, tuples, mappings and dataclasses, in order."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(*value)
        elif isinstance(value, Mapping):
            found += tensors_in(*value.values())
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            found += tensors_in(*(getattr(value, field.name) for field in dataclasses.fields(value)))
    return found


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with every tensor changed; what holds no tensor is passed on as it is."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if type(value) is dict:
        return {key: map_tensors(item, change) for key, item in value.items()}
    return value


def outputs_in(value: Any) -> Iterator[torch.Tensor]:
    """Like `tensors_in`, and also the tensors in attributes of objects of any other class; each object once."""
    seen: set[int] = set()
    found = [value]
    while found:
        value = found.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif value is not None and not isinstance(value, _OPAQUE) and id(value) not in seen:
            seen.add(id(value))
            found += _parts(value)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]


def _slots(kind: type) -> Iterable[str]:
    names = kind.__dict__.get("__slots__", ())
    return (names,) if isinstance(names, str) else names


def kept_by(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """Tensors in attributes of modules, alone or in a short list, tuple or dict: a module may keep a loss there."""
    for module in modules:
        for name, value in vars(module).items():
            is_kept = value.__class__ in _KEPT and name not in _OWN
            if is_kept and (isinstance(value, torch.Tensor) or len(value) <= _KEPT_COUNT):
                yield from tensors_in(value)
