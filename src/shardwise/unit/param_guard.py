"""Guards on parameters that are not gathered: no use of one gets other values than its own.

`step()` returns while updated weights are still being gathered. The hooks on a unit's own modules wait for them, but
there are many other ways to use a parameter: reading it by hand, `state_dict`, another optimizer. So while a gather is
in flight, the unit's parameters are of a subclass that torch's dispatch asks before any operation; the first operation
waits for the gather, and the parameters are plain again. Released parameters are guarded the same way: in the middle of
a forward their first use gathers them, and elsewhere their values can be neither read nor written. Their shape, dtype
and device can, and aliases of them (`p.data`, `p.detach()`, what `state_dict` of a part of the model holds) are guarded
too. Gathered parameters are plain and cost nothing, except inside `shardwise.gathered`: there they are guarded, so that
a backward of what is computed from them gathers them again (see `saved_tensors`), and an alias of one has no values
once they are released.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

from shardwise.unit.saved_tensors import Buffered, following, storage_of
from shardwise.unit.tensor_use import Use, kind_of, name_of, uses


class Owner(Buffered, Protocol):
    """The object that is asked before the values of guarded parameters are used."""

    is_read: bool
    """Whether they are gathered, and the user computes with them."""

    def react(self, tensor: torch.Tensor, use: Use, func_name: str) -> None:
        """A torch function is about to use a guarded tensor: see to it that the values are there, or raise."""

    def has_values(self, tensor: torch.Tensor) -> bool:
        """Whether a guarded tensor could be read now, after a wait at most."""

    def describe(self, tensor: torch.Tensor) -> str:
        """What to print for a guarded tensor that has no values."""

    def lock(self) -> bool:
        """Gather the values, make the parameters plain, and keep them until `unlock`."""

    def unlock(self) -> None:
        """Allow the release again."""


PLAINLY = torch._C.DisableTorchFunctionSubclass
"""Within it, guarded parameters are plain: their attributes are read and set without a call into Python."""


class ParamGuard:
    """The parameters of one owner, each with its own class and its guarded subclass."""

    def __init__(self, params: Iterable[torch.Tensor], owner: Owner) -> None:
        params = list(params)
        self.owner = owner
        guarded = {kind: self._guarded_class(kind) for kind in {type(param) for param in params}}
        self._classes = [(param, type(param), guarded[type(param)]) for param in params]
        self._aliases: dict[type, type] = {}

    def begin(self) -> None:
        """From now on, the owner is asked before any torch function uses the values of a parameter."""
        for param, _, guarded in self._classes:
            param.__class__ = guarded

    def end(self) -> None:
        """Make the parameters plain again."""
        for param, plain, _ in self._classes:
            param.__class__ = plain

    def give_up(self, param: torch.Tensor) -> None:
        """Make one parameter plain, for good."""
        for each, plain, _ in self._classes:
            if each is param:
                each.__class__ = plain
        self._classes = [entry for entry in self._classes if entry[0] is not param]

    def watch(self, alias: Any, param: torch.Tensor) -> None:
        """Guard a new tensor that has the storage of a parameter."""
        plain = type(alias)
        if plain not in self._aliases:
            methods = {"__reduce_ex__": _reduce_alias, "__deepcopy__": _deepcopy_alias}
            self._aliases[plain] = type(plain.__name__, (plain,), {**self._common(plain), **methods})
        alias.__class__ = self._aliases[plain]  # not `as_subclass`, which would be one more node in the graph
        alias._shardwise_param = param

    def _guarded_class(self, plain: type[torch.Tensor]) -> type[torch.Tensor]:
        methods = {"__reduce_ex__": _reduce_ex, "__deepcopy__": _deepcopy}
        return type(plain.__name__, (plain,), {**self._common(plain), **methods})

    def _common(self, plain: type[torch.Tensor]) -> dict[str, Any]:
        def describe(tensor: torch.Tensor, **options: Any) -> str:
            has_values = self.owner.has_values(tensor)
            return plain.__repr__(tensor, **options) if has_values else self.owner.describe(tensor)

        def form(tensor: torch.Tensor, spec: str) -> str:
            return plain.__format__(tensor, spec) if spec or self.owner.has_values(tensor) else describe(tensor)

        texts = {"__repr__": describe, "__format__": form}
        return {"_shardwise_guard": self, "__torch_function__": classmethod(_react), **texts}


def param_behind(tensor: torch.Tensor) -> torch.Tensor:
    """The parameter that a guarded tensor is an alias of, or is."""
    param: torch.Tensor = vars(tensor).get("_shardwise_param", tensor)
    return param


def _is_guarded(value: Any) -> bool:
    return hasattr(type(value), "_shardwise_guard")


def _guard_of(tensor: Any) -> ParamGuard:
    guard: ParamGuard = tensor._shardwise_guard
    return guard


def _react(cls: type, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    if kind_of(func) is Use.METADATA:
        with PLAINLY():
            return func(*args, **kwargs)
    for tensor, use in uses(func, args, kwargs, _is_guarded):
        _guard_of(tensor).owner.react(tensor, use, name_of(func))
    owners = [_guard_of(tensor).owner for tensor, _ in uses(func, args, kwargs, _is_guarded)]
    with PLAINLY(), following(owner for owner in owners if owner.is_read):
        result = func(*args, **kwargs)
    for source, use in uses(func, args, kwargs, _is_guarded):  # those that are guarded still
        _watch_aliases(result, source, use, name_of(func))
    return result


def _watch_aliases(result: Any, source: torch.Tensor, use: Use, func_name: str) -> None:
    """Guard what has the storage of a guarded tensor; what was copied from one that has no values is an error."""
    guard = _guard_of(source)
    for made in _tensors(result):
        if made is source or _is_guarded(made):
            continue
        if storage_of(made) == storage_of(source):
            guard.watch(made, param_behind(source))
        elif use is Use.ALIAS:
            guard.owner.react(source, Use.READ, func_name)


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        yield from (each for each in result if isinstance(each, torch.Tensor))


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
    owner = _guard_of(param).owner
    owner.lock()
    try:
        if type(param) is not torch.nn.Parameter:
            return copy.deepcopy(param, memo)  # a quantised one takes its scales along
        return torch.nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
    finally:
        owner.unlock()


def _reduce_alias(self: torch.Tensor, protocol: int) -> Any:
    _guard_of(self).owner.react(self, Use.READ, "pickle")
    return self.detach().clone().requires_grad_(self.requires_grad).__reduce_ex__(protocol)


def _deepcopy_alias(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if id(self) not in memo:
        _guard_of(self).owner.react(self, Use.READ, "copy.deepcopy")
        memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
    copied: torch.Tensor = memo[id(self)]
    return copied
