"""Reading and writing whole values: `gathered`, `full_*`, and state_dict over sharded weights.

Everything here is a collective unless the weights are replicated, and `full_state` always is: all ranks call it, with
the same parameters.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.optim.states import extras_of, state_views
from shardwise.partition.dtensors import local
from shardwise.partition.stored import is_wrapper, stored_in
from shardwise.schedule.hooks import ours
from shardwise.unit import Unit
from shardwise.unit.params import PLAINLY, is_guarded, param_behind
from shardwise.unit.saved_tensors import storage_of

# A table beside the parameters, not an attribute on them: they pickle as they are.
_UNITS: MutableMapping[torch.Tensor, weakref.ref[Unit]] = WeakTensorKeyDictionary()


@contextlib.contextmanager
def gathered(
    params: torch.Tensor | Iterable[torch.Tensor | None] | None, write: bool = False, source: int | None = None
) -> Iterator[None]:
    """Within it, `params` hold their whole values, whatever the placement.

    `params` is one tensor or any iterable of tensors and None, in any order, with duplicates; what no engine manages
    (buffers, other tensors) is passed over. With `write`, what was written into them is kept, master copy included:
    all ranks must have written the same, or `source` names the rank whose values everyone takes. Without it, do not
    write: whether the values stay depends on the precision. A backward of what is computed here gathers them again.

    >>> import torch, shardwise
    >>> model = torch.nn.Linear(4, 2)
    >>> engine = shardwise.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero3")
    >>> with shardwise.gathered(model.weight, write=True), torch.no_grad():
    ...     _ = model.weight.fill_(1.0)
    >>> engine.full_param("weight").sum().item()
    8.0
    """
    units = _units_of(params)
    if source is not None and units and source not in range(units[0].comm.world_size):
        raise ValueError(f"source is {source!r}: it names one of the {units[0].comm.world_size} ranks, counted from 0")
    read = [unit for unit in units if not unit.weights.lock()]
    try:
        for unit in read:
            unit.weights.begin_reading()
        try:
            yield
        finally:
            for unit in read:
                unit.weights.end_reading()
        if write:
            for unit in units:
                unit.weights.take_back(source)
    finally:
        for unit in units:
            unit.weights.unlock()


def full_param(units: Sequence[Unit], name: str) -> torch.Tensor:
    unit = _find(units, name)
    unit.finish_update()
    return unit.whole(unit.weights.whole(unit.weights.master), name)


def full_grad(units: Sequence[Unit], name: str) -> torch.Tensor:
    unit = _find(units, name)
    if not unit.is_trainable:
        raise ValueError(f"parameter {name!r} is frozen and has no gradient")
    if not unit.grads.is_reduced:
        raise RuntimeError(
            f"the gradient of {name!r} is not reduced yet: ask for it after the last backward of a step and before "
            'engine.step(); with gradients.reduce_at = "step", read the local p.grad instead'
        )
    value = unit.whole(unit.grads.full_copy(), name)
    unit.comm.confirm()
    return value


def full_state(units: Sequence[Unit], optimizer: torch.optim.Optimizer | None, name: str) -> dict[str, torch.Tensor]:
    unit = _find(units, name)
    if optimizer is None or not unit.is_trainable:
        raise ValueError(f"parameter {name!r} is not trained by this engine and has no optimizer state")
    unit.synchronize()
    mine, others = _owned_state(optimizer, unit, name)
    # Ranks own different parts, some of them none: they first agree on what there is to gather.
    known = {key: value.dtype for key, value in mine.items()} | others
    shared = unit.comm.share_object(known, f"state of {name}")
    everyone = {key: kind for one in reversed(shared) for key, kind in one.items()}
    state: dict[str, torch.Tensor] = {}
    for key, kind in sorted(everyone.items()):
        if isinstance(kind, torch.Tensor):
            state[key] = kind.clone()
            continue
        flat = torch.zeros(unit.weights.owned.numel, dtype=kind, device=unit.comm.device)
        state[key] = unit.whole(unit.weights.whole(mine.get(key, flat)), name)
    return state


def is_managed(param: torch.Tensor) -> bool:
    """Whether an engine has this parameter."""
    return param in _UNITS


def unit_of(param: torch.Tensor) -> Unit | None:
    """The unit that has this parameter; None if no engine has it."""
    reference = _UNITS.get(param)
    return reference() if reference is not None else None


class Access:
    """Maps parameters to their units, and makes state_dict work over sharded weights."""

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self._units = units
        for unit in self._units:
            for param in unit.params:
                _UNITS[param] = weakref.ref(unit)
        self._handles = [
            model.register_state_dict_post_hook(ours(_StateDictHook(units))),
            model.register_load_state_dict_pre_hook(ours(_LoadHook(units, begins=True))),
            model.register_load_state_dict_post_hook(ours(_LoadHook(units, begins=False))),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for unit in self._units:
            for param in unit.params:
                del _UNITS[param]


class _StateDictHook:
    """Replaces stand-ins by whole values, one unit at a time."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        sharded = [unit for unit in self._units if unit.weights.policy.weights_sharded]
        keys = _keys_of_params(state, sharded)
        for unit in sharded:
            with gathered(unit.params):
                for param in unit.params:
                    if id(param) in keys:
                        state.update(dict.fromkeys(keys[id(param)], param.detach().clone()))
        names = _aliases(module) if any(unit.spec.inner for unit in sharded) else {}
        for name, param in module.named_parameters() if names else ():
            if is_wrapper(param):
                with gathered(param):
                    value = param.detach().clone()
                state.update({prefix + alias: value for alias in names[name] if prefix + alias in state})
        self._units[0].comm.confirm()  # replicated weights may be those of an update whose gather broke off


class _LoadHook:
    """Gathers all weights before load_state_dict writes them, and updates the masters afterwards."""

    def __init__(self, units: Sequence[Unit], begins: bool) -> None:
        self._units = units
        self._begins = begins

    def __call__(self, module: nn.Module, *details: Any) -> None:
        if self._begins and details[2].get("assign_to_params_buffers"):
            raise ValueError(
                "load_state_dict(assign=True) would take the parameters out of the engine: leave assign out, and the "
                "values are copied"
            )
        for unit in self._units:
            if self._begins:
                unit.weights.lock()
            else:
                unit.weights.take_back()
                unit.weights.unlock()


def _keys_of_params(state: Mapping[str, Any], units: Sequence[Unit]) -> dict[int, list[str]]:
    """The keys of a state_dict under which each parameter is, by its id. They need not be its names: state_dict leaves
    out what wrappers around a module (`checkpoint_wrapper`) add to them."""
    keys: dict[int, list[str]] = {}
    with PLAINLY():
        gathered_at = {_place(param): param for unit in units for param in unit.params if not is_guarded(param)}
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                param = param_behind(value) if is_guarded(value) else gathered_at.get(_place(value))
                keys.setdefault(id(param), []).append(key)
    return keys


def _place(tensor: torch.Tensor) -> tuple[int, int, torch.Size]:
    """Which values a tensor shows: those of its storage from an offset on, in a shape."""
    storage = storage_of(tensor)
    return storage, int(local(tensor).storage_offset()) if storage else 0, tensor.shape


def _aliases(module: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter, by its first."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(first.setdefault(id(param), name), []).append(name)
    return names


def _units_of(params: torch.Tensor | Iterable[torch.Tensor | None] | None) -> list[Unit]:
    given = list(params) if isinstance(params, Iterable) and not isinstance(params, torch.Tensor) else [params]
    found: dict[tuple[int, str], Unit] = {}
    for param in given:
        if not isinstance(param, torch.Tensor | None):
            raise TypeError(
                f"gathered() takes parameters and was given {type(param).__name__} objects: pass model.parameters(), "
                "not the model, its modules or model.named_parameters()"
            )
        for _, tensor in stored_in(param) if param is not None else ():
            if (unit := unit_of(tensor)) is not None:
                found[unit.number, unit.name] = unit
    # Callers may pass sets, whose order differs between ranks: gather in the engine's order.
    return [found[key] for key in sorted(found)]


def _find(units: Sequence[Unit], name: str) -> Unit:
    for unit in units:
        if name in unit.names:
            return unit
    parts = [part for unit in units for part in unit.names if part.startswith(f"{name}.")]
    if parts:
        raise KeyError(f"parameter {name!r} is quantised and consists of other tensors: ask for {' or '.join(parts)}")
    raise KeyError(
        f"the model has no parameter {name!r}: names are those that model.named_parameters() had at initialize"
    )


def _owned_state(
    optimizer: torch.optim.Optimizer, unit: Unit, name: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The optimizer state of the pieces that hold some of a parameter: what has a value for each element, flat over
    what is owned, and what has not (steps, a matrix optimizer's rows and columns), as it is."""
    owned, slot = unit.weights.owned, unit.layout.slot(name).span
    state: dict[str, torch.Tensor] = {}
    others: dict[str, torch.Tensor] = {}
    for view in state_views(unit, optimizer):
        kind, _, key = view.key.partition("/")
        if kind == "optim" and slot.intersect(view.span):
            values = view.read(view.span)
            flat = state.setdefault(key, values.new_zeros(owned.numel))
            flat[view.span.shift(-owned.start).slice] = values
    for extra in extras_of(unit, optimizer):
        value = torch.as_tensor(extra.value) if extra.value is not None else torch.empty(0)
        if slot.intersect(extra.span) and (value.ndim == 0 or value.numel()):
            others[extra.key] = value.cpu()
    return state, others
