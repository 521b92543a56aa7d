"""The parameters of a unit: what they point to, and what happens when they are used.

`ParamBinding` points them to views of the unit's full buffer while it is gathered, and to stand-ins while it is
released. A stand-in is NaN (0 for integers), expanded to the shape of its parameter. Users can point a parameter
elsewhere with `param.data = ...`, which is found by comparing addresses.

`ParamGuard` keeps uses of parameters that are not gathered from getting other values than their own. `step()` returns
while updated weights are still being gathered. The hooks on a unit's own modules wait for them, but there are many
other ways to use a parameter: reading it by hand, `state_dict`, another optimizer. So while a gather is in flight, the
unit's parameters are of a subclass that torch's dispatch asks before any operation; the first operation waits for the
gather, and the parameters are plain again. Released parameters are guarded the same way: in the middle of a forward
their first use gathers them, and elsewhere their values can be neither read nor written. Their shape, dtype and device
can, and aliases of them (`p.data`, `p.detach()`, what `state_dict` of a part of the model holds) are guarded too.
Gathered parameters are plain and cost nothing, except inside `shardwise.gathered`: there they are guarded, so that a
backward of what is computed from them gathers them again (see `saved_tensors`), and an alias of one has no values once
they are released.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from shardwise.errors import ModelChangedError, NotGatheredError
from shardwise.memory import Buffer
from shardwise.partition.dtensors import is_dtensor, local, locals_of, set_dtype
from shardwise.partition.stored import rebind_copies
from shardwise.tensors import blank
from shardwise.unit.plan import UnitPlan
from shardwise.unit.saved_tensors import Buffered, following, storage_of
from shardwise.unit.tensor_use import DATA, Use, kind_of, name_of, uses

_ADDRESS = torch.Tensor.data_ptr


class ParamBinding:
    """Binds `params`, laid out as `plan` says, to views of `full` or to stand-ins."""

    def __init__(self, plan: UnitPlan, params: Sequence[torch.Tensor], full: Buffer) -> None:
        self._params = params
        self._has_dtensors = any(map(is_dtensor, params))
        self._locals = locals_of(params)
        self._names = [slot.spec.name for slot in plan.layout.slots]
        self._views = full.views(plan.layout)
        nothing = blank(plan.policy.weight_dtype, full.tensor.device)
        self._stand_ins = [nothing.expand(slot.spec.shape) for slot in plan.layout.slots]
        self._bound: Sequence[torch.Tensor] = self._views
        self.is_fake = type(full.tensor) is not torch.Tensor
        """Whether these are the fake tensors of a dry run, which have no address."""

    def bind_views(self) -> None:
        self._bind(self._views)

    def bind_stand_ins(self) -> None:
        self._bind(self._stand_ins)

    def _bind(self, tensors: Sequence[torch.Tensor]) -> None:
        self._bound = tensors
        with PLAINLY():  # guarded parameters would ask first
            for param, tensor in zip(self._locals, tensors, strict=True):
                param.data = tensor

    def adopt(self, dtype: torch.dtype) -> None:
        """Bind the parameters, which get this dtype, and copies that wrappers hold of them, to views."""
        for param in self._params:
            set_dtype(param, dtype)
        self._locals = locals_of(self._params)
        self.bind_views()
        for param, view in zip(self._params, self._views, strict=True):
            rebind_copies(param, view)

    def error(self) -> ModelChangedError | None:
        """What to raise for a parameter to which the user has given other storage; None if there is none."""
        for name, _, _ in self._rebound():
            return ModelChangedError(
                f"{name!r} was given other storage (`param.data = ...`), which the engine neither updates nor saves: "
                "assign inside `with shardwise.gathered(params, write=True):`, and resize before shardwise.initialize"
            )
        return None

    def reclaim(self) -> None:
        """Copy what the user has put into storage of its own to where the engine has the values, and bind the
        parameters to that again."""
        for name, param, tensor in self._rebound():
            values = local(param)
            if values.shape != tensor.shape:
                raise ModelChangedError(
                    f"{name!r} has the shape {tuple(values.shape)} now and had {tuple(tensor.shape)}: resize before "
                    "shardwise.initialize; copy.deepcopy(engine.module) gives a plain model to resize"
                )
            tensor.copy_(values.detach())
            values.data = tensor

    def _rebound(self) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """The parameters that are not where the engine has put them: name, parameter, and that place."""
        if self.is_fake:
            return []
        with PLAINLY():
            now = locals_of(self._params) if self._has_dtensors else self._params
            if list(map(_ADDRESS, now)) == list(map(_ADDRESS, self._bound)):
                return []
            bound = zip(self._names, self._params, self._bound, strict=True)
            return [(name, param, at) for name, param, at in bound if _ADDRESS(local(param)) != _ADDRESS(at)]


class Owner(Buffered, Protocol):
    """The weights whose parameters are guarded."""

    is_read: bool
    """Whether they are gathered, and the user computes with them."""

    @property
    def is_freed(self) -> bool:
        """Whether they are gone for good."""

    @property
    def has_values(self) -> bool:
        """Whether they can be read now, after a wait at most."""

    def gather_for_use(self) -> None:
        """Gather the values in the middle of a pass, and wait for those on their way."""

    def lock(self) -> bool:
        """Gather the values, make the parameters plain, and keep them until `unlock`."""

    def unlock(self) -> None:
        """Allow the release again."""


PLAINLY = torch._C.DisableTorchFunctionSubclass
"""Within it, guarded parameters are plain: their attributes are read and set without a call into Python."""


class ParamGuard:
    """The parameters of one owner, each with its own class and its guarded subclass."""

    def __init__(self, plan: UnitPlan, params: Sequence[torch.Tensor], owner: Owner) -> None:
        self.owner = owner
        self._unit_name = plan.name
        self._names = [(param, slot.spec.name) for param, slot in zip(params, plan.layout.slots, strict=True)]
        guarded = {kind: self._guarded_class(kind) for kind in {type(param) for param in params}}
        self._classes = [(param, type(param), guarded[type(param)]) for param in params]
        self._aliases: dict[type, type] = {}

    def begin(self) -> None:
        """From now on, any torch function that uses the values of a parameter asks for them (see `react`)."""
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

    def react(self, tensor: torch.Tensor, use: Use, func_name: str) -> None:
        """A torch function is about to use a guarded tensor: bring the values in the middle of a pass; elsewhere raise.

        An alias of a stand-in never gets any. Once freed, a parameter may be given storage of its own.
        """
        if self.owner.is_freed:
            self._react_freed(tensor, use, func_name)
            return
        if use is Use.WRITE and not self.has_values(tensor):
            raise NotGatheredError(
                f"{self._name_of(tensor)!r}, a parameter of {self._unit_name}, is sharded and not gathered, so "
                f"{func_name} would write nowhere: write inside `with shardwise.gathered(params, write=True):`"
            )
        if self._is_bound(tensor):
            self.owner.gather_for_use()
        if use is Use.READ and not self.has_values(tensor):
            name = self._name_of(tensor)
            raise NotGatheredError(
                f"{name!r}, a parameter of {self._unit_name}, is sharded and not gathered, so {func_name} would find "
                "no values: use it inside `with shardwise.gathered(params):`, on all ranks, read it with "
                f"engine.full_param({name!r}), or call its module through the engine"
            )

    def has_values(self, tensor: torch.Tensor) -> bool:
        """Whether a parameter, or an alias of one, could be read now, after a wait at most."""
        return self._is_bound(tensor) and self.owner.has_values

    def _is_bound(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the unit's values while these are gathered: not an alias that was made before."""
        return param_behind(tensor) is tensor or storage_of(tensor) == self.owner.storage_id

    def _name_of(self, tensor: torch.Tensor) -> str:
        behind = param_behind(tensor)
        return next((name for param, name in self._names if param is behind), self._unit_name)

    def _react_freed(self, tensor: torch.Tensor, use: Use, func_name: str) -> None:
        if use is Use.WRITE and func_name == name_of(DATA):
            self.give_up(tensor)
        elif use is not Use.ALIAS:
            raise NotGatheredError(
                f"{self._name_of(tensor)!r}, a parameter of {self._unit_name}, has no values for {func_name}: its "
                "engine was destroyed, which freed them. Take engine.state_dict() before, or set `param.data = ...`"
            )

    def _describe(self, tensor: torch.Tensor) -> str:
        """What to print for a parameter, or an alias of one, that has no values."""
        with PLAINLY():
            return f"<{self._name_of(tensor)!r} {tuple(tensor.shape)} {tensor.dtype} {tensor.device}: not gathered>"

    def _guarded_class(self, plain: type[torch.Tensor]) -> type[torch.Tensor]:
        methods = {"__reduce_ex__": _reduce_ex, "__deepcopy__": _deepcopy}
        return type(plain.__name__, (plain,), {**self._common(plain), **methods})

    def _common(self, plain: type[torch.Tensor]) -> dict[str, Any]:
        def describe(tensor: torch.Tensor, **options: Any) -> str:
            return plain.__repr__(tensor, **options) if self.has_values(tensor) else self._describe(tensor)

        def form(tensor: torch.Tensor, spec: str) -> str:
            return plain.__format__(tensor, spec) if spec or self.has_values(tensor) else describe(tensor)

        texts = {"__repr__": describe, "__format__": form}
        return {"_shardwise_guard": self, "__torch_function__": classmethod(_react), **texts}


def param_behind(tensor: torch.Tensor) -> torch.Tensor:
    """The parameter that a guarded tensor is an alias of, or is."""
    param: torch.Tensor = vars(tensor).get("_shardwise_param", tensor)
    return param


def is_guarded(value: Any) -> bool:
    """Whether a value is a parameter that is guarded now, or an alias of one."""
    return hasattr(type(value), "_shardwise_guard")


def _guard_of(tensor: Any) -> ParamGuard:
    guard: ParamGuard = tensor._shardwise_guard
    return guard


def _react(cls: type, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    if kind_of(func) is Use.METADATA:
        with PLAINLY():
            return func(*args, **kwargs)
    for tensor, use in uses(func, args, kwargs, is_guarded):
        _guard_of(tensor).react(tensor, use, name_of(func))
    owners = [_guard_of(tensor).owner for tensor, _ in uses(func, args, kwargs, is_guarded)]
    with PLAINLY(), following(owner for owner in owners if owner.is_read):
        result = func(*args, **kwargs)
    for source, use in uses(func, args, kwargs, is_guarded):  # those that are guarded still
        _watch_aliases(result, source, use, name_of(func))
    return result


def _watch_aliases(result: Any, source: torch.Tensor, use: Use, func_name: str) -> None:
    """Guard what has the storage of a guarded tensor; what was copied from one that has no values is an error."""
    guard = _guard_of(source)
    for made in _tensors(result):
        if made is source or is_guarded(made):
            continue
        if storage_of(made) == storage_of(source):
            guard.watch(made, param_behind(source))
        elif use is Use.ALIAS:
            guard.react(source, Use.READ, func_name)


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
    _guard_of(self).react(self, Use.READ, "pickle")
    return self.detach().clone().requires_grad_(self.requires_grad).__reduce_ex__(protocol)


def _deepcopy_alias(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if id(self) not in memo:
        _guard_of(self).react(self, Use.READ, "copy.deepcopy")
        memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
    copied: torch.Tensor = memo[id(self)]
    return copied
