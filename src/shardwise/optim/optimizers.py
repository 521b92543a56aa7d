"""The user's optimizers: one, or several that share the model's parameters, as one torch optimizer."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any, cast

import torch
from torch import nn

from shardwise.config.optimizers import REFUSED
from shardwise.errors import ConfigError
from shardwise.partition.policy import Group

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Any]
GroupRule = Callable[[torch.optim.Optimizer, dict[str, Any]], bool]
"""Whether the tensors of a parameter group have to stay whole, given the optimizer that it belongs to."""


class Joint(torch.optim.Optimizer):
    """Several optimizers as one: Muon for matrices and AdamW for the rest, say.

    Its parameter groups are theirs, one after the other, the very same dicts: LR schedulers act on either.

    >>> weight, bias = nn.Parameter(torch.eye(2)), nn.Parameter(torch.zeros(2))
    >>> joint = Joint([torch.optim.Muon([weight], lr=0.1), torch.optim.AdamW([bias], lr=0.2)])
    >>> [group["lr"] for group in joint.param_groups]
    [0.1, 0.2]
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.members = tuple(optimizers)
        self._steps = [bare_step(member) for member in self.members]
        for number, member in enumerate(self.members):
            for group in member.param_groups:
                group["member"] = number  # in the group, so that it is there again after load_state_dict
        super().__init__([group for member in self.members for group in member.param_groups], {})
        for member in self.members:
            self.state.update(member.state)
        self._link()
        self.register_step_pre_hook(_Hooks("_optimizer_step_pre_hooks"))
        self.register_step_post_hook(_Hooks("_optimizer_step_post_hooks"))

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # torch's closures return a loss
        """Step every member that has a group here."""
        for number, (member, step) in enumerate(zip(self.members, self._steps, strict=True)):
            mine = [group for group in self.param_groups if group["member"] == number]
            member.param_groups, everything = mine, member.param_groups
            try:
                if mine:
                    step()
            finally:
                member.param_groups = everything

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._link()

    def _link(self) -> None:
        """Point the members at our groups and states."""
        for number, member in enumerate(self.members):
            member.state = self.state
            member.param_groups = [group for group in self.param_groups if group["member"] == number]


class _Hooks:
    """Calls the hooks that the members were given."""

    def __init__(self, which: str) -> None:
        self._which = which

    def __call__(self, joint: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for member in members(joint)[1:]:
            for hook in getattr(member, self._which).values():
                hook(member, args, kwargs)


def members(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizer itself, and those it is made of."""
    return (optimizer, *optimizer.members) if isinstance(optimizer, Joint) else (optimizer,)


def single(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that update parameters: those it is made of, or itself."""
    return optimizer.members if isinstance(optimizer, Joint) else (optimizer,)


def resolve_optimizer(given: Any, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """One optimizer on the model's parameters, from an instance, several, or a callable that makes them."""
    optimizer = _one(given, params)
    for member in members(optimizer):
        _check_usable(member)
    return optimizer


def _check_usable(optimizer: torch.optim.Optimizer) -> None:
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError(f"optimizer {kind} is not supported: {REFUSED['SparseAdam']}; use torch.optim.Adam")
    arguments = inspect.signature(bare_step(optimizer)).parameters.values()
    if any(each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in arguments):
        raise ConfigError(
            f"optimizer {kind} is not supported: {REFUSED['LBFGS']}, in a closure, which an engine cannot call on "
            "shards; use an optimizer whose step() needs no closure, such as torch.optim.AdamW"
        )


def _one(given: Any, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    if isinstance(given, torch.optim.Optimizer):
        return given
    if isinstance(given, (list, tuple)) and given and all(isinstance(one, torch.optim.Optimizer) for one in given):
        return _join(given)
    if isinstance(given, (list, tuple)) or not callable(given):
        raise ConfigError(
            f"optimizer is {type(given).__name__}: pass a torch optimizer built on model.parameters(), a list of such "
            "optimizers, or a callable that takes parameters and returns one, such as "
            "functools.partial(torch.optim.AdamW, lr=1e-3)"
        )
    made = given(params)
    return made if isinstance(made, torch.optim.Optimizer) else _join(made)


def _join(optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    try:
        return optimizers[0] if len(optimizers) == 1 else Joint(optimizers)
    except ValueError as error:
        raise ConfigError(f"the optimizers cannot work together: {error}") from error


def groups_of(
    optimizer: torch.optim.Optimizer, params: Mapping[str, torch.Tensor], needs_whole: GroupRule
) -> dict[str, Group]:
    """The optimizer group of each trainable parameter of the model."""
    by_id = {
        id(param): Group(number, whole)
        for number, group in enumerate(optimizer.param_groups)
        for whole in [needs_whole(_owner(optimizer, group), group)]
        for param in group["params"]
    }
    groups = {name: by_id.pop(id(param)) for name, param in params.items() if id(param) in by_id}
    if by_id:
        raise ConfigError(
            f"the optimizer holds {len(by_id)} parameter(s) that the model does not have: build it on the parameters "
            "of the very model you pass to shardwise.initialize"
        )
    missing = [name for name, param in params.items() if param.requires_grad and name not in groups]
    if missing:
        raise ConfigError(
            f"the optimizer does not hold the trainable parameter {missing[0]!r}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            + ": add them to a parameter group, or set requires_grad to False"
        )
    return groups


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """The optimizer's step without the hooks and the profiler's mark that torch wraps around it: those run once a step,
    not once a unit."""
    own = optimizer.__dict__.get("step")
    if own is not None and not getattr(own, "_wrapped_by_lr_sched", False):
        return cast(Callable[[], Any], own)
    step: Any = type(optimizer).step
    bare = step.__wrapped__ if getattr(step, "hooked", False) else step
    return MethodType(bare, optimizer)


def twin(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Another optimizer of the same kind, without states, which can be stepped at the same time."""
    other = _alike(optimizer)
    if isinstance(other, Joint):
        other.members = tuple(_alike(member) for member in other.members)
        other._steps = [bare_step(member) for member in other.members]
    state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    for each in members(other):
        each.state = state
    return other


def _alike(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    other = object.__new__(type(optimizer))
    # Not what was set for one step: it would apply to all later ones. Nor what the engine has replaced.
    passing = ("step", "zero_grad", "found_inf", "grad_scale")
    other.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key not in passing})
    return other


def prefer_fused(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Choose torch's fused kernel where the optimizer has one and the user did not choose."""
    chosen = any(group.get(name) for name in ("foreach", "fused", "capturable", "differentiable"))
    has_fused = "fused" in inspect.signature(type(_owner(optimizer, group)).__init__).parameters
    if has_fused and not chosen and group["fused"] is None:
        group["fused"] = True


def _owner(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> torch.optim.Optimizer:
    return optimizer.members[group["member"]] if isinstance(optimizer, Joint) else optimizer
