"""The model inside wrappers, and its own names for its tensors: without those of torch.compile and the like."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

# What torch.compile, activation checkpointing and FSDP call the module that they wrap, anywhere in a model.
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_PARALLEL = "module"
"""What DistributedDataParallel and other wrappers of a whole model call it. Others may use the word, so it counts only
at the start of every name."""


def underlying(model: nn.Module) -> nn.Module:
    """The model inside all wrappers around it."""
    while (inner := _inside(model)) is not None:
        model = inner
    return model


def underlying_names(names: Iterable[str]) -> dict[str, str]:
    """The names of tensors in the model inside all wrappers, by their names outside.

    >>> underlying_names(["_orig_mod.a.weight", "_orig_mod.layers.0._checkpoint_wrapped_module.b"])
    {'_orig_mod.a.weight': 'a.weight', '_orig_mod.layers.0._checkpoint_wrapped_module.b': 'layers.0.b'}
    >>> underlying_names(["module.a", "module.module.b"]), underlying_names(["module.a", "b"])
    ({'module.a': 'a', 'module.module.b': 'module.b'}, {'module.a': 'module.a', 'b': 'b'})
    """
    found = {name: [part for part in name.split(".") if part not in _WRAPPED] for name in names}
    if found and all(parts[0] == _PARALLEL and len(parts) > 1 for parts in found.values()):
        found = {name: parts[1:] for name, parts in found.items()}
    return {name: ".".join(parts) for name, parts in found.items()}


def _inside(model: nn.Module) -> nn.Module | None:
    children = dict(model.named_children())
    name, child = next(iter(children.items()), ("", None))
    has_own = any(True for _ in model.parameters(recurse=False)) or any(True for _ in model.buffers(recurse=False))
    return child if len(children) == 1 and not has_own and name in (*_WRAPPED, _PARALLEL) else None
