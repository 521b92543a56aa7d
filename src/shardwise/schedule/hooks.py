"""The modules of a model that get hooks, the units that each of them uses, and which of them are running."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwise.unit.unit import Unit


@dataclass
class HookedModule:
    """A module with hooks, the units its forward uses, and those among them whose run ends with it.

    depth           calls in progress: a module may call itself, and only the outermost exit releases
    borrowed_units  units that the call in progress uses without holding them
    inside          the module and those inside it that no other hooked module has, except torch's own
    """

    is_root: bool
    depth: int = 0
    units: list[Unit] = field(default_factory=list)
    ends: set[str] = field(default_factory=set)
    borrowed_units: list[Unit] = field(default_factory=list)
    inside: list[nn.Module] = field(default_factory=list)


class RunningModules:
    """The hooked modules of a model, by path, and the calls of them that are in progress."""

    def __init__(self, modules: dict[str, HookedModule]) -> None:
        self.modules = modules
        self.root = modules[""]
        self._calls: list[HookedModule] = []

    @property
    def innermost(self) -> HookedModule | None:
        return self._calls[-1] if self._calls else None

    def ignores(self, module: HookedModule) -> bool:
        """Whether a call of a module needs no action: it has no units, and another module is running."""
        return not module.units and not module.is_root and not module.depth and bool(self._calls)

    def enter(self, module: HookedModule) -> None:
        """A call of a module begins."""
        module.depth += 1
        self._calls.append(module)

    def leave(self, module: HookedModule) -> bool:
        """A call of a module returns; returns whether it was the outermost of that module."""
        # A call that raised an exception which the model caught did not arrive here.
        while self._calls and self._calls.pop() is not module:
            pass
        module.depth = max(0, module.depth - 1)  # a backward inside the forward has set it to 0
        return not module.depth

    def units(self) -> list[Unit]:
        """What the modules in progress use."""
        return [unit for module in self._calls for unit in (*module.units, *module.borrowed_units)]

    def forget(self) -> None:
        """No call is in progress any more."""
        for module in self.modules.values():
            module.depth = 0
            module.borrowed_units = []
        self._calls = []


def hooked_modules(model: nn.Module, units: Sequence[Unit]) -> dict[str, HookedModule]:
    """The modules that get hooks, by path; the root always does, and those around others, which users may call by
    themselves: `generate` calls an encoder."""
    modules = {"": HookedModule(is_root=True)}
    for unit in units:
        for run in unit.spec.runs:
            for path in run:
                modules.setdefault(path, HookedModule(is_root=False)).units.append(unit)
            modules[run[-1]].ends.add(unit.name)
    for path, module in model.named_modules():
        # torch's own modules keep no losses in attributes, and the search takes time: 7 % of a profiled step of 400
        # tiny layers.
        if not type(module).__module__.startswith("torch.nn."):
            modules[_enclosing(path, modules)].inside.append(module)
    around = {path[:end] for path in modules for end, letter in enumerate(path) if letter == "."}
    for path in sorted(around - modules.keys() - containers(model)):
        modules[path] = HookedModule(is_root=False)
    return modules


def containers(model: nn.Module) -> set[str]:
    """The paths of lists and dictionaries of modules."""
    kinds = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    return {path for path, module in model.named_modules() if isinstance(module, kinds)}


def _enclosing(path: str, modules: Collection[str]) -> str:
    """The innermost hooked module at or above a module."""
    while path not in modules:
        path = path.rpartition(".")[0]
    return path


def ours(hook: Any) -> Any:
    """Mark a hook on a module as the engine's, so that copies of the module are made without it."""
    hook._is_shardwise = True
    return hook


def is_ours(hook: Any) -> bool:
    """Whether a hook is the engine's."""
    return hasattr(hook, "_is_shardwise")
