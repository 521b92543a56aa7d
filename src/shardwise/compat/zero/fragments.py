"""`deepspeed.utils.safe_get_*` and `safe_set_*`: whole or local values of one parameter under any stage."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine
    from shardwise.partition import Span
    from shardwise.unit.state_view import StateView
    from shardwise.unit.unit import Unit

__all__ = [
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
]
_MASTER, _STATE = "param", "optim/"
"""The keys of the values that one can set: the master, and the optimizer's states by name."""
_ENGINES: MutableMapping[torch.Tensor, tuple[weakref.ref[Engine], str]] = WeakTensorKeyDictionary()


def register(engine: Engine) -> None:
    """Remember which engine has a model's parameters."""
    for name, param in engine.module.named_parameters():
        _ENGINES[param] = weakref.ref(engine), name


def engine_of(param: torch.Tensor) -> Engine | None:
    """The engine that has a parameter now."""
    found = _find(param)
    return found[0] if found is not None else None


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """The value that is updated, whole; None of a frozen parameter. A collective."""
    found = _find_trained(param)
    return found[0].full_param(found[1]) if found is not None else None


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The gradient, averaged over the ranks, between the last backward of a step and `step()`. A collective.

    Inside `no_sync`, this rank's own sum. None if there is none.
    """
    found = _find(param)
    if found is None:
        return param.grad
    unit = _unit(param)
    if not unit.is_trainable or not unit.grads.has_gradients:
        return None
    if not unit.grads.is_reduced:
        return unit.grads.local_copy(found[1])
    return found[0].full_grad(found[1]).float()


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """A state of the optimizer, whole; None of a frozen parameter, and before the first step. A collective."""
    found = _find_trained(param)
    if found is None:
        return None
    states = found[0].full_state(found[1])
    if states and optim_state_key not in states:
        raise ValueError(f"the optimizer has no state {optim_state_key!r}: it has {', '.join(map(repr, states))}")
    return states.get(optim_state_key)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the value that is updated. All ranks pass the same."""
    _write(param, _MASTER, value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace a state of the optimizer. All ranks pass the same."""
    _write(param, _STATE + optim_state_key, value)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the reduced gradient, before `step()`. All ranks pass the same."""
    _check_has_gradient(param)
    _, part = _own_part(param)
    _write_local_grad(param, _flat(value, param.numel())[part.shift(-_slot(param).start).slice])


def safe_update_full_grad_vectorized(
    params: Iterable[nn.Parameter], update_func: Callable[[torch.Tensor | None, nn.Parameter], torch.Tensor]
) -> None:
    """Replace gradients by what a function makes of them and their parameters, before `step()`. A collective."""
    for param in params:
        safe_set_full_grad(param, update_func(safe_get_full_grad(param), param))


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's elements of the value that is updated, flat; None of a frozen parameter."""
    return local_values(param) if _find_trained(param) is not None else None


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's elements of the reduced gradient, flat; None if there is none."""
    if _find_trained(param) is None or not _unit(param).grads.has_gradients:
        return None
    shard, part = _own_part(param)
    values = _unit(param).grads.shard.tensor
    return values[part.shift(-shard.start).slice].clone() if part else values.new_empty(0)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's elements of the reduced gradient, before `step()`. All ranks call it."""
    _check_has_gradient(param)
    _write_local_grad(param, value)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's elements of a state of the optimizer, flat; None of a frozen parameter."""
    return _local(param, _STATE + optim_state_key) if _find_trained(param) is not None else None


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's elements of the value that is updated. All ranks call it."""
    _write_local(param, _MASTER, value)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace this rank's elements of a state of the optimizer."""
    _write_local(param, _STATE + optim_state_key, value)


def local_values(param: nn.Parameter) -> torch.Tensor:
    return _local(param, _MASTER)


def _find(param: torch.Tensor) -> tuple[Engine, str] | None:
    reference, name = _ENGINES.get(param, (None, ""))
    engine = reference() if reference is not None else None
    return (engine, name) if engine is not None else None


def _find_trained(param: nn.Parameter) -> tuple[Engine, str] | None:
    return _find(param) if param.requires_grad else None


def _own_part(param: torch.Tensor) -> tuple[Span, Span]:
    """Where this rank's shard and its elements of a parameter lie in the unit's flat buffer."""
    unit = _unit(param)
    shard = unit.layout.shard(unit.comm.shard_index)
    return shard, _slot(param).intersect(shard)


def _flat(values: Any, numel: int) -> Any:
    """The elements of a tensor, which are as many as are replaced."""
    if values.numel() != numel:
        raise AssertionError(f"Number of elements do not match: {values.numel()} are given, and {numel} are replaced")
    return values.reshape(-1)


def _write_local_grad(param: torch.Tensor, values: torch.Tensor) -> None:
    shard, part = _own_part(param)
    values = _flat(values, part.numel)

    def change(grads: torch.Tensor) -> None:
        if part:
            grads[part.shift(-shard.start).slice].copy_(values)

    _unit(param).grads.shard.edit(change)


def _unit(param: torch.Tensor) -> Unit:
    from shardwise.engine.access import unit_of

    unit = unit_of(param)
    if unit is None:
        raise ValueError("the parameter is under no engine: pass one of engine.module.parameters()")
    return unit


def _slot(param: torch.Tensor) -> Span:
    unit, found = _unit(param), _find(param)
    assert found is not None
    return unit.layout.slot(found[1]).span


def _check_has_gradient(param: torch.Tensor) -> None:
    """Raise where there is no reduced gradient that could be replaced."""
    unit = _unit(param)
    if not unit.is_trainable:
        raise ValueError(f"{_name(param)} is frozen, and has no gradient to set: pass parameters that are trained")
    if not unit.grads.is_reduced:
        raise ValueError(
            f"{_name(param)} has no reduced gradient now: set it after the last backward of a step, and before step()"
        )


def _check_has(param: torch.Tensor, key: str) -> None:
    """Raise where there are no values of a key, and setting them would change nothing."""
    if key == _MASTER:
        return
    name = key.removeprefix(_STATE)
    unit, found = _unit(param), _find(param)
    assert found is not None
    if not unit.is_trainable:
        raise ValueError(f"{_name(param)} is frozen, and has no state to set: pass parameters that are trained")
    optimizer = found[0].optimizer
    groups = optimizer.param_groups if optimizer is not None else []
    known = {each for state in optimizer.state.values() for each in state} if optimizer is not None else set()
    has_elements = any(piece.numel() for group in groups for piece in group["params"])  # a rank may own none
    if name not in known and (has_elements or optimizer is None):
        has = ", ".join(map(repr, sorted(known))) or "none before its first step"
        raise ValueError(f"the optimizer has no state {name!r}: it has {has}")


def _name(param: torch.Tensor) -> str:
    found = _find(param)
    return repr(found[1]) if found is not None else "the parameter"


def _views(param: torch.Tensor, key: str) -> Iterator[tuple[StateView, Span]]:
    """The values of a key that this rank has of a parameter, and where they lie in the unit's flat buffer."""
    from shardwise.optim.states import state_views

    slot, found = _slot(param), _find(param)
    assert found is not None
    for view in state_views(_unit(param), found[0].optimizer):
        part = slot.intersect(view.span)
        if view.key == key and part:
            yield view, part


def _local(param: torch.Tensor, key: str) -> torch.Tensor:
    parts = [view.read(part).clone() for view, part in _views(param, key)]
    return torch.cat(parts) if parts else torch.empty(0, device=param.device)


def _write(param: torch.Tensor, key: str, values: torch.Tensor) -> None:
    start, values = _slot(param).start, _flat(values, param.numel())
    _check_has(param, key)
    for view, part in _views(param, key):
        view.write(part, values[part.shift(-start).slice])
    _refresh(param, key)


def _write_local(param: torch.Tensor, key: str, values: Any) -> None:
    own, position = [part for _, part in _views(param, _MASTER)], 0
    values = _flat(values, sum(part.numel for part in own))
    _check_has(param, key)
    for view, part in _views(param, key):
        view.write(part, values[position : position + part.numel])
        position += part.numel
    _refresh(param, key)


def _refresh(param: torch.Tensor, key: str) -> None:
    if key == _MASTER:
        _unit(param).weights.refresh()
