"""Replacements for methods of the model's modules that would bypass the engine: copying, pickling, conversion.

- A copy (`copy.deepcopy`, `pickle`, `torch.save`) is a plain module: whole values, and nothing of the engine. Where
  weights are sharded it is made from gathered values, so all ranks make it.
- A conversion (`to`, `half`, `cuda`, ...) that changes nothing is done; any other is refused, because the parameters
  are views of the engine's buffers.
- PEFT's `merge_adapter` and `unmerge_adapter` write into the weights, so they run on gathered ones and what they
  wrote is kept; `merge_and_unload` and `unload`, which take modules out of the model, are refused.
- `zero_grad` drops the gradients that the engine holds, all of them at once.
- cuDNN's recurrent networks would put their weights into one buffer of their own (`flatten_parameters`); ours serves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.engine.access import gathered
from shardwise.engine.root_call import CALLS
from shardwise.errors import GradientError, ModelChangedError
from shardwise.partition.stored import is_wrapper
from shardwise.schedule.hooks import is_ours
from shardwise.unit.held_grads import HeldGrad
from shardwise.unit.param_guard import PLAINLY

_WRITES_WEIGHTS = ("merge_adapter", "unmerge_adapter")
_TAKES_APART = ("merge_and_unload", "unload")
_OWN_METHODS = ("__reduce_ex__", "__deepcopy__", "_apply", "zero_grad", "flatten_parameters", "generate")
_REPLACED = (*_OWN_METHODS, *_WRITES_WEIGHTS, *_TAKES_APART, *CALLS)


class ModuleGuard:
    """Replaces methods of every module of a model, on the instances, until removed."""

    def __init__(self, model: nn.Module, zero_grad: Callable[[], None]) -> None:
        self._modules = list(model.modules())
        for module in self._modules:
            methods: dict[str, Callable[..., Any]] = {"__reduce_ex__": _reduce_ex, "_apply": _apply}
            methods["zero_grad"] = partial(_zero_grad, model, zero_grad)
            if any(map(is_wrapper, module._parameters.values())):
                methods["__deepcopy__"] = _deepcopy
            if isinstance(module, nn.RNNBase):
                methods["flatten_parameters"] = _do_nothing
            if _is_tuner(module):
                methods |= {name: partial(_written, name) for name in _WRITES_WEIGHTS}
                methods |= {name: partial(_refused, name) for name in _TAKES_APART}
            vars(module).update({name: partial(method, module) for name, method in methods.items()})

    def remove(self) -> None:
        for module in self._modules:
            _strip(vars(module))


def _reduce_ex(module: nn.Module, protocol: Any) -> Any:
    """How copies are made: `copy` and `pickle` both ask the instance."""
    reduced: Any = type(module).__reduce_ex__(module, protocol)
    make, args, state, *rest = reduced
    if isinstance(state, dict):
        state = _strip(_without_hooks(state))
    return make, args, state, *rest


def _deepcopy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """As without it, on gathered values: torch clones a quantised weight before it copies the tensors inside."""
    method = vars(module).pop("__deepcopy__")
    try:
        with gathered(module._parameters.values()):
            return copy.deepcopy(module, memo)
    finally:
        vars(module)["__deepcopy__"] = method


def _strip(attributes: dict[str, Any]) -> dict[str, Any]:
    for name in _REPLACED:
        if isinstance(attributes.get(name), partial):
            del attributes[name]
    return attributes


def _without_hooks(state: dict[str, Any]) -> dict[str, Any]:
    """The same attributes, without the engine's hooks. A hook has one number in all tables of a module."""
    tables = {name: table for name, table in state.items() if "hooks" in name and isinstance(table, dict)}
    numbers = {key for table in tables.values() for key, hook in table.items() if is_ours(hook)}
    cleared = {
        name: type(table)((key, hook) for key, hook in table.items() if key not in numbers)
        for name, table in tables.items()
    }
    return {**state, **cleared}


def _apply(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """As torch's own for buffers and submodules; parameters must stay as they are."""
    if recurse:
        for child in module.children():
            child._apply(fn)
    for name, param in module._parameters.items():
        if param is not None:
            _check_unchanged(type(module).__name__, name, param, fn)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)
    return module


def _check_unchanged(kind: str, name: str, param: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    probe = fn(torch.empty(0, dtype=param.dtype, device=param.device))
    if (probe.dtype, probe.device) != (param.dtype, param.device):
        was, wanted = (f"{str(t.dtype).removeprefix('torch.')} on {t.device}" for t in (param, probe))
        raise RuntimeError(
            f"{name!r} of {kind} is {was} under an engine and cannot become {wanted}: convert the model before "
            "shardwise.initialize, or choose precision.compute in the configuration; copy.deepcopy(engine.module) "
            "gives a plain model to convert"
        )


def _is_tuner(module: nn.Module) -> bool:
    """Whether a module is one of PEFT's tuners: known by its methods, so that PEFT need not be imported."""
    return all(callable(getattr(type(module), name, None)) for name in (*_WRITES_WEIGHTS, *_TAKES_APART))


def _written(name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with gathered(module.parameters(), write=True), torch.no_grad():
        return getattr(type(module), name)(module, *args, **kwargs)


def _refused(name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    raise ModelChangedError(
        f"{name}() would take the adapters out of a model under an engine: call it on a plain copy, "
        f"copy.deepcopy(engine.module).{name}(), on all ranks; merge_adapter() merges in place"
    )


def _zero_grad(model: nn.Module, drop: Callable[[], None], module: nn.Module, set_to_none: bool = True) -> None:
    """Drop all gradients of the engine, or none: those of a part of the model lie among the others."""
    own = list(module.parameters())
    with PLAINLY():
        is_whole = {id(p) for p in model.parameters() if p.requires_grad} <= {id(p) for p in own}
        is_held = any(isinstance(param.grad, HeldGrad) for param in own)
    if is_whole:
        drop()
    elif is_held:
        raise GradientError(
            f"zero_grad() of {type(module).__name__}, a part of the model, while the engine holds the gradients of all "
            "parts: call engine.zero_grad(), which drops all of them"
        )
    else:
        type(module).zero_grad(module, set_to_none)


def _do_nothing(module: nn.Module) -> None:
    pass
