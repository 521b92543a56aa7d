"""Guards on parameters that are not gathered: the first use of one waits for its values.

`step()` returns while updated weights are still being gathered. The hooks on a unit's own modules wait for them, but
there are many other ways to use a parameter: reading it by hand, `state_dict`, another optimizer. So while a gather is
in flight, the unit's parameters are of a subclass that torch's dispatch asks before any operation; the first operation
waits for the gather, and the parameters are plain again. Released parameters are guarded the same way, to refuse
writes, which would be lost. Gathered parameters are plain and cost nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree


class Owner(Protocol):
    """The object that is asked before the values of guarded parameters are used."""

    def react(self, func: Callable[..., Any]) -> None:
        """The torch function `func` is about to use the values."""

    def lock(self) -> None:
        """Gather the values, and keep them until `unlock`."""

    def unlock(self) -> None:
        """Allow the release again."""


PLAINLY = torch._C.DisableTorchFunctionSubclass
"""Within it, guarded parameters are plain: their attributes are read and set without a call into Python."""


def _functions(kind: str, *names: str) -> set[Any]:
    return {getattr(getattr(torch.Tensor, name), kind) for name in names}


# Functions that do not read the values do not wait. `model.zero_grad()` right after `step()` reads `grad` of every
# parameter and would otherwise wait for the whole gather.
_METADATA = {
    *_functions("__get__", "shape", "dtype", "device", "requires_grad", "ndim", "grad", "is_leaf", "grad_fn", "layout"),
    *_functions("__set__", "grad", "requires_grad"),
    *(torch.Tensor.size, torch.Tensor.numel, torch.Tensor.dim, torch.Tensor.stride, torch.Tensor.element_size),
    *(torch.Tensor.is_floating_point, torch.Tensor.register_hook, torch.Tensor.is_contiguous),
    torch.Tensor.requires_grad_,
}
_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # a descriptor
_READ_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]  # a descriptor
_OPERATORS = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"}


def writes(func: Callable[..., Any]) -> bool:
    """Whether a torch function writes in place."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in _OPERATORS or func == _DATA


class ParamGuard:
    """The parameters of one owner, each with its own class and its guarded subclass."""

    def __init__(self, params: Iterable[torch.Tensor], owner: Owner) -> None:
        params = list(params)
        kinds = {type(param) for param in params}
        guarded = {kind: _guarded_class(kind, owner) for kind in kinds}
        self._classes = [(param, type(param), guarded[type(param)]) for param in params]

    def begin(self) -> None:
        """From now on, the owner is asked before any torch function uses the values of a parameter."""
        for param, _, guarded in self._classes:
            param.__class__ = guarded

    def end(self) -> None:
        """Make the parameters plain again."""
        for param, plain, _ in self._classes:
            param.__class__ = plain


def _guarded_class(plain: type[torch.Tensor], owner: Owner) -> type[torch.Tensor]:
    common = {"_shardwise_owner": owner, "__torch_function__": classmethod(_react)}
    members = {
        **common,
        "_shardwise_data": type("Tensor", (torch.Tensor,), common),
        "__reduce_ex__": _reduce_ex,
        "__deepcopy__": _deepcopy,
    }
    return type(plain.__name__, (plain,), members)


def _react(cls: type, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if func not in _METADATA:
        for leaf in pytree.tree_iter((args, kwargs)):
            owner = getattr(leaf, "_shardwise_owner", None)
            if owner is not None:
                owner.react(func)
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **(kwargs or {}))
    if func == _READ_DATA and cls is type(args[0]):  # still guarded: writes into it are refused like those into args[0]
        return result.as_subclass(cls._shardwise_data)
    return result


def _reduce_ex(self: torch.Tensor, protocol: int) -> Any:
    """Pickle the values alone: neither the class, which exists only here, nor its link to an engine."""
    return _plain_copy(self, {}).__reduce_ex__(protocol)


def _deepcopy(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if id(self) not in memo:
        memo[id(self)] = _plain_copy(self, memo)
    copied: torch.Tensor = memo[id(self)]
    return copied


def _plain_copy(param: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """A separate parameter with the whole values. A collective where they are sharded."""
    owner: Owner = param._shardwise_owner  # type: ignore[attr-defined]  # of our class
    owner.lock()
    try:
        if type(param) is not torch.nn.Parameter:
            return copy.deepcopy(param, memo)  # a quantised one takes its scales along
        return torch.nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
    finally:
        owner.unlock()
