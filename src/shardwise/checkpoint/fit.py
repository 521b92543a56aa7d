"""Whether a checkpoint fits an engine: every parameter and buffer, by name and shape, and the optimizer's groups."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.checkpoint.contents import optimizer_name, persistent_buffers
from shardwise.checkpoint.manifest import Manifest
from shardwise.errors import CheckpointError
from shardwise.optim.states import MASTER

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine


def check_fit(engine: Engine, manifest: Manifest, path: Path) -> None:
    """A CheckpointError that names the first thing that does not fit. Reads nothing but the manifest."""
    shapes = {slot.spec.name: slot.spec.shape for unit in engine.units for slot in unit.layout.slots}
    buffers = {name: tuple(buffer.shape) for name, buffer in persistent_buffers(engine.module).items()}
    stored = [key.removeprefix("buffer/") for key in manifest.tensors if key.startswith("buffer/")]
    _check_names("parameter", shapes, manifest.params, path)
    _check_names("buffer", buffers, stored, path)
    wanted = {f"{MASTER}/{name}": shape for name, shape in shapes.items()}
    wanted |= {f"buffer/{name}": shape for name, shape in buffers.items()}
    for key, shape in wanted.items():
        seen = manifest.tensors[key].shape
        if seen != shape:
            raise CheckpointError(f"{path} is of another model: {key} has shape {list(seen)} there, {list(shape)} here")
    _check_optimizer(engine, manifest, path)


def _check_names(what: str, here: Collection[str], there: Collection[str], path: Path) -> None:
    missing = [name for name in here if name not in there]
    surplus = [name for name in there if name not in here]
    if missing:
        near = difflib.get_close_matches(missing[0], surplus, n=1)
        hint = f"; it has {near[0]!r}" if near else ""
        raise CheckpointError(f"{path} is of another model: it has no {what} {missing[0]!r}{hint}")
    if surplus:
        raise CheckpointError(f"{path} is of another model: this one has no {what} {surplus[0]!r}")


def _check_optimizer(engine: Engine, manifest: Manifest, path: Path) -> None:
    groups = manifest.training.get("groups")
    if engine.optimizer is None or groups is None:
        return
    kind = optimizer_name(engine.optimizer)
    if manifest.optimizer is not None and manifest.optimizer != kind:
        raise CheckpointError(f"{path} was saved with the optimizer {manifest.optimizer}; this engine has {kind}")
    if len(groups) != len(engine.optimizer.param_groups):
        raise CheckpointError(
            f"{path} has {len(groups)} parameter groups; the optimizer has {len(engine.optimizer.param_groups)}"
        )
    for unit in engine.units:
        for slot in unit.layout.slots if unit.is_trainable else ():
            saved = manifest.params[slot.spec.name].group
            if saved not in (None, slot.spec.group):
                raise CheckpointError(
                    f"{path} has {slot.spec.name!r} in parameter group {saved}; the optimizer has it in group "
                    f"{slot.spec.group}"
                )
