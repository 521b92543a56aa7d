"""Modules that DeepSpeed gathers as a whole, and the whole model for `generate`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from shardwise.compat.zero import GatheredParameters

_MARK = "_z3_leaf"


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[Any], raise_if_not_found: bool = True, **options: Any
) -> list[nn.Module]:
    """Mark the modules of these classes, and return them. It changes nothing: whole blocks are gathered as one unit."""
    return _marked(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[Any], raise_if_not_found: bool = True, **options: Any
) -> list[nn.Module]:
    """Remove the mark."""
    return _marked(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_module(module: nn.Module, flag: bool) -> None:
    vars(module)[_MARK] = flag


def z3_leaf_module(module: nn.Module) -> bool:
    return bool(vars(module).get(_MARK, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if z3_leaf_module(module)]


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """The model inside an engine, with whole parameters under stage 3. A collective."""
    inner = getattr(model, "module", model)
    with GatheredParameters(inner.parameters()):
        yield inner


def _marked(model: nn.Module, classes: Iterable[Any], flag: bool, raises: bool) -> list[nn.Module]:
    """Marks modules by their class, its name, or its full name."""
    wanted = list(classes)
    found = [module for module in model.modules() if any(_is_of(module, kind) for kind in wanted)]
    if raises and not found:
        raise ValueError(f"No modules of type {wanted} found in model {type(model).__name__}: name classes that it has")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _is_of(module: nn.Module, kind: Any) -> bool:
    if isinstance(kind, str):
        own = type(module)
        return kind in (own.__name__, own.__qualname__, f"{own.__module__}.{own.__qualname__}")
    return isinstance(module, kind)
