"""Parameters that react: those whose values are on their way, and those that are released.

`step()` returns while updated weights are still being gathered. A unit's own modules wait for it in their hooks, but
a model is looked at in many other ways: a parameter read by hand, `state_dict`, an optimizer of the user's. So while
a gather is in flight the unit's parameters are of a subclass that torch's own dispatch asks before any operation;
the first one settles the unit, and the parameters are plain again. Released parameters are watched the same way, to
refuse writes, which would go nowhere. Parameters that are ready are plain and cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree


class Owner(Protocol):
    """Who answers for the values of watched parameters."""

    def react(self, func: Callable[..., Any]) -> None:
        """The torch function `func` is about to use the values."""

    def pin(self) -> None:
        """The values are needed whole, from now on."""

    def unpin(self) -> None:
        """They are not any more."""


PLAINLY = torch._C.DisableTorchFunctionSubclass
"""Within it, guarded parameters are plain: their attributes are read and set without a call into Python."""


def _functions(kind: str, *names: str) -> set[Any]:
    return {getattr(getattr(torch.Tensor, name), kind) for name in names}


# Questions about a parameter that its values have no part in: answered without waiting. `model.zero_grad()` right
# after `step()` asks for `grad` of every parameter and would otherwise wait for the whole gather.
_METADATA = {
    *_functions("__get__", "shape", "dtype", "device", "requires_grad", "ndim", "grad", "is_leaf", "grad_fn", "layout"),
    *_functions("__set__", "grad", "requires_grad"),
    *(torch.Tensor.size, torch.Tensor.numel, torch.Tensor.dim, torch.Tensor.stride, torch.Tensor.element_size),
    *(torch.Tensor.is_floating_point, torch.Tensor.register_hook, torch.Tensor.is_contiguous),
    torch.Tensor.requires_grad_,
}
_OPERATORS = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"}


def writes(func: Callable[..., Any]) -> bool:
    """Whether a torch function works in place."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in _OPERATORS


class ParamGuard:
    """The parameters of one owner, and the classes they are of while it reacts for them."""

    def __init__(self, params: Iterable[torch.Tensor], owner: Owner) -> None:
        params = list(params)
        kinds = {type(param) for param in params}
        watched = {kind: _watched_class(kind, owner) for kind in kinds}
        self._classes = [(param, type(param), watched[type(param)]) for param in params]

    def begin(self) -> None:
        """From now on, the owner reacts before any torch function uses the values of one of the parameters."""
        for param, _, watched in self._classes:
            param.__class__ = watched

    def end(self) -> None:
        """Make the parameters plain again. Those of a gather that could not be issued are so already."""
        for param, plain, _ in self._classes:
            param.__class__ = plain


def _watched_class(plain: type[torch.Tensor], owner: Owner) -> type[torch.Tensor]:
    members = {
        "_shardwise_owner": owner,
        "__torch_function__": classmethod(_react),
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
        return func(*args, **(kwargs or {}))


def _reduce_ex(self: torch.Tensor, protocol: int) -> Any:
    """Pickle the values alone: neither the class, which only exists here, nor what ties it to an engine."""
    return _plain_copy(self).__reduce_ex__(protocol)


def _deepcopy(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if id(self) not in memo:
        memo[id(self)] = _plain_copy(self)
    copied: torch.Tensor = memo[id(self)]
    return copied


def _plain_copy(param: torch.Tensor) -> torch.nn.Parameter:
    """A parameter of its own with the whole values. Where they are sharded, a collective."""
    owner: Owner = param._shardwise_owner  # type: ignore[attr-defined]  # of our class
    owner.pin()
    try:
        return torch.nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
    finally:
        owner.unpin()
