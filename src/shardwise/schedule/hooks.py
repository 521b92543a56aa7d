"""The modules of a model that get hooks, and the units that each of them uses."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwise.unit.unit import Unit


@dataclass
class HookedModule:
    """A module with hooks, the units its forward uses, and those among them whose run ends with it.

    `depth` counts calls under way: a module may call itself, and only the outermost exit releases. `borrowed_units`
    are units that the call under way uses without holding them. `inside` are the module and those in it
    that no other hooked module has, torch's own apart.
    """

    is_root: bool
    depth: int = 0
    units: list[Unit] = field(default_factory=list)
    ends: set[str] = field(default_factory=set)
    borrowed_units: list[Unit] = field(default_factory=list)
    inside: list[nn.Module] = field(default_factory=list)


def hooked_modules(model: nn.Module, units: Sequence[Unit]) -> dict[str, HookedModule]:
    """By path; the root is one in any case."""
    sites = {"": HookedModule(is_root=True)}
    for unit in units:
        for run in unit.spec.runs:
            for path in run:
                sites.setdefault(path, HookedModule(is_root=False)).units.append(unit)
            sites[run[-1]].ends.add(unit.name)
    for path, module in model.named_modules():
        # torch's own keep nothing, and looking takes its time: 7 % of a profiled step of 400 tiny layers.
        if not type(module).__module__.startswith("torch.nn."):
            sites[_enclosing(path, sites)].inside.append(module)
    return sites


def containers(model: nn.Module) -> set[str]:
    """The paths of lists and dictionaries of modules."""
    kinds = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    return {path for path, module in model.named_modules() if isinstance(module, kinds)}


def _enclosing(path: str, sites: Collection[str]) -> str:
    """The innermost site at or above a module."""
    while path not in sites:
        path = path.rpartition(".")[0]
    return path


def ours(hook: Any) -> Any:
    """Mark a hook on a module as the engine's, so that copies of the module are made without it."""
    hook._is_shardwise = True
    return hook


def is_ours(hook: Any) -> bool:
    """Whether a hook is the engine's."""
    return hasattr(hook, "_is_shardwise")
