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
    _write(param, "param", value.reshape(-1))


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace a state of the optimizer. All ranks pass the same."""
    _write(param, f"optim/{optim_state_key}", value.reshape(-1))


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the reduced gradient, before `step()`. All ranks pass the same."""
    _, part = _own_part(param)
    _write_local_grad(param, value.reshape(-1)[part.shift(-_slot(param).start).slice] if part else value)


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
    _write_local_grad(param, value.reshape(-1))


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's elements of a state of the optimizer, flat; None of a frozen parameter."""
    return _local(param, f"optim/{optim_state_key}") if _find_trained(param) is not None else None


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's elements of the value that is updated. All ranks call it."""
    _write_local(param, "param", value)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace this rank's elements of a state of the optimizer."""
    _write_local(param, f"optim/{optim_state_key}", value)


def local_values(param: nn.Parameter) -> torch.Tensor:
    return _local(param, "param")


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


def _write_local_grad(param: torch.Tensor, values: torch.Tensor) -> None:
    shard, part = _own_part(param)

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
    found = _find(param)
    assert found is not None
    return _unit(param).layout.slot(found[1]).span


def _views(param: torch.Tensor, key: str) -> Iterator[tuple[StateView, Span]]:
    """The values of a key that this rank has of a parameter, and where they lie in the unit's flat buffer."""
    from shardwise.optim.states import state_views

    found, slot = _find(param), _slot(param)
    assert found is not None
    for view in state_views(_unit(param), found[0].optimizer):
        part = slot.intersect(view.span)
        if view.key == key and part:
            yield view, part


def _local(param: torch.Tensor, key: str) -> torch.Tensor:
    parts = [view.read(part).clone() for view, part in _views(param, key)]
    return torch.cat(parts) if parts else torch.empty(0, device=param.device)


def _write(param: torch.Tensor, key: str, values: torch.Tensor) -> None:
    start = _slot(param).start
    for view, part in _views(param, key):
        view.write(part, values[part.shift(-start).slice])
    _refresh(param, key)


def _write_local(param: torch.Tensor, key: str, values: Any) -> None:
    position = 0
    for view, part in _views(param, key):
        view.write(part, values.reshape(-1)[position : position + part.numel])
        position += part.numel
    _refresh(param, key)


def _refresh(param: torch.Tensor, key: str) -> None:
    if key == "param":
        _unit(param).weights.refresh()
