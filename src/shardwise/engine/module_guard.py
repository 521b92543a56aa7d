"""The model under an engine: methods that would bypass the engine are replaced, and changes of the model are noticed.

`ModuleGuard` replaces methods of the model's modules: copying, pickling, conversion.

- A copy (`copy.deepcopy`, `pickle`, `torch.save`) is a plain module: whole values, and nothing of the engine. Where
  weights are sharded it is made from gathered values, so all ranks make it.
- A conversion (`to`, `half`, `cuda`, ...) that changes nothing is done; any other is refused, because the parameters
  are views of the engine's buffers. `model.cpu()`, a common last line, is a warning: nothing moves.
- PEFT's `merge_adapter` and `unmerge_adapter` write into the weights, so they run on gathered ones and what they
  wrote is kept; `merge_and_unload` and `unload`, which take modules out of the model, are refused.
- `zero_grad` drops the gradients that the engine holds, all of them at once.
- `flatten_parameters` of recurrent networks would copy the weights into a buffer for cuDNN; the engine's buffer serves.

`ModelWatch` notices at `step()` what was changed: new parameters, rebound or written ones. An adapter added after
`initialize`, a replaced head or resized embeddings bring parameters that the engine does not own: nothing would ever
update them. Walking all parameters in every step would take too long. So the watch compares the tables of all modules
with what was in them before, object by object, and walks only if something was replaced. That takes a millisecond for
2000 modules: it is done in the first steps, and then in every 16th. Weights in 16 bit that were written in place
(`param.data.add_(...)`) are found by comparing a few elements with the master copies.
"""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from shardwise.engine.access import gathered
from shardwise.engine.root_call import CALLS
from shardwise.errors import GradientError, HabitWarning, ModelChangedError
from shardwise.partition.stored import is_wrapper
from shardwise.schedule.hooks import is_ours
from shardwise.tensors import HostFlags, dtype_name
from shardwise.unit import Unit
from shardwise.unit.held_grads import HeldGrad
from shardwise.unit.params import PLAINLY

_WRITES_WEIGHTS = ("merge_adapter", "unmerge_adapter")
_TAKES_APART = ("merge_and_unload", "unload")
_OWN_METHODS = (
    "__reduce_ex__",
    "__deepcopy__",
    "_apply",
    "zero_grad",
    "flatten_parameters",
    "generate",
    "save_pretrained",
)
_REPLACED = (*_OWN_METHODS, *_WRITES_WEIGHTS, *_TAKES_APART, *CALLS)
_FIRST, _EVERY = 4, 16  # how many steps are checked at first, and the interval after that


class ModuleGuard:
    """Replaces methods of every module of a model, on the instances, until removed."""

    def __init__(self, model: nn.Module, zero_grad: Callable[[], None]) -> None:
        self._modules = list(model.modules())
        for module in self._modules:
            methods: dict[str, Callable[..., Any]] = {"__reduce_ex__": _reduce_ex, "_apply": _apply}
            methods["zero_grad"] = partial(_zero_grad, model, zero_grad)
            if any(map(is_wrapper, module._parameters.values())) or hasattr(type(module), "__deepcopy__"):
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
    """Copy a module with its values gathered, and without what the engine has set on it.

    torch clones a quantised weight before it copies the tensors inside, and a class that copies itself (a parametrized
    module) copies all attributes of the instance.
    """
    attributes = vars(module)
    guarded = attributes.copy()
    plain = _strip(_without_hooks(guarded))
    try:
        attributes.clear()
        attributes.update(plain)
        with gathered(module._parameters.values()):
            return copy.deepcopy(module, memo)
    finally:
        attributes.clear()
        attributes.update(guarded)


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
    """torch's own `_apply` for buffers and submodules; parameters must not change."""
    if _moves_to_host(module, fn):
        warnings.warn(
            f"{type(module).__name__} stays on its device: its engine holds the weights there. Call engine.destroy() "
            "to free them, engine.state_dict() for whole values, or copy.deepcopy(engine.module).cpu() for a model",
            HabitWarning,
            stacklevel=4,
        )
        return module
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


def _moves_to_host(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether a conversion changes no dtype and only takes parameters from a device to the host."""
    kinds = {(param.dtype, param.device) for param in module.parameters()}
    made = {kind: fn(torch.empty(0, dtype=kind[0], device=kind[1])) for kind in kinds}
    moved = [kind for kind, probe in made.items() if probe.device != kind[1]]
    is_same = all(probe.dtype == dtype for (dtype, _), probe in made.items())
    return bool(moved) and is_same and all(made[kind].device.type == "cpu" for kind in moved)


def _check_unchanged(kind: str, name: str, param: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    probe = fn(torch.empty(0, dtype=param.dtype, device=param.device))
    if (probe.dtype, probe.device) != (param.dtype, param.device):
        was, wanted = (f"{dtype_name(t.dtype)} on {t.device}" for t in (param, probe))
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


class ModelWatch:
    """Compares a model with what it was when its engine was made."""

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self._model = model
        self._units = units
        self._owned = {id(param) for unit in units for param in unit.params}
        self._tables: list[dict[str, Any]] = []
        self._seen: list[Any] = []
        self._checks = 0
        self._written: tuple[list[str], HostFlags] | None = None
        self._look()

    def check(self) -> None:
        """Refuse trainable parameters that the engine does not own, and parameters with storage of their own."""
        if self._checks < _FIRST or self._checks % _EVERY == 0:
            self.examine()
            self._compare()
        self._refuse_written()
        self._checks += 1  # not if it raised: the next step checks again

    def examine(self) -> None:
        """Like `check`, in every step."""
        now = chain.from_iterable(map(dict.values, self._tables))
        if not all(map(operator.is_, now, self._seen)) or sum(map(len, self._tables)) != len(self._seen):
            self._check_owned()
            self._look()
        for unit in self._units:
            if (error := unit.weights.rebound_error()) is not None:
                raise error

    def _compare(self) -> None:
        flags = {unit.name: flag for unit in self._units if (flag := unit.weights.was_written()) is not None}
        if flags and self._written is None:
            self._written = list(flags), HostFlags(torch.stack(list(flags.values())))

    def _refuse_written(self) -> None:
        if self._written is None or not self._written[1].are_here:
            return
        (names, flags), self._written = self._written, None
        for name, is_written in zip(names, flags.wait(), strict=True):
            if is_written:
                raise ModelChangedError(
                    f"a parameter of {name} was written in place (such as `param.data.add_(...)`), and the update from "
                    "its fp32 master copy would undo that: write inside `with shardwise.gathered(params, write=True):`"
                )

    def _look(self) -> None:
        modules = list(self._model.modules())
        self._tables = [table for module in modules for table in (module._modules, module._parameters)]
        self._seen = list(chain.from_iterable(map(dict.values, self._tables)))

    def _check_owned(self) -> None:
        with PLAINLY():
            foreign = [
                name
                for name, param in self._model.named_parameters()
                if id(param) not in self._owned and param.requires_grad
            ]
        if foreign:
            more = f" and {len(foreign) - 1} more parameters are" if len(foreign) > 1 else " is"
            raise ModelChangedError(
                f"{foreign[0]!r}{more} trainable and not in the engine, which would never update them: add adapters, "
                "replace heads and resize embeddings before shardwise.initialize, and build the optimizer after it; "
                "copy.deepcopy(engine.module) gives a plain model to initialize again"
            )
