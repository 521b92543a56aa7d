"""Loading: every rank reads the elements that it owns now, from the files that have them."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from shardwise.checkpoint.checkpointable import Checkpointable, ModelParts, on_all_ranks, on_rank_0, overlaps
from shardwise.checkpoint.contents import optimizer_name
from shardwise.checkpoint.files import CheckpointReader
from shardwise.checkpoint.folder import candidates, missing_files
from shardwise.checkpoint.hub_folder import underlying_names
from shardwise.checkpoint.manifest import Manifest, read_manifest
from shardwise.checkpoint.object_store import locate
from shardwise.checkpoint.plain import REMEDY, from_plain, set_rng_states
from shardwise.checkpoint.storage import MANIFEST, Location
from shardwise.checkpoint.training_state import (
    TrainingState,
    check_extra,
    check_groups,
    check_rng_states,
    check_schedule,
    check_steps,
)
from shardwise.errors import CheckpointError, DamagedError
from shardwise.files import validated
from shardwise.optim.states import PARAM, piece_spans, prepare, set_extra, state_views
from shardwise.partition.layout import Span
from shardwise.unit.unit import Unit

T = TypeVar("T")
_LOG = logging.getLogger("shardwise")


def load(model: ModelParts, root: str | Location, tag: str, fallback: bool, missing_ok: bool) -> Any:
    """Restore engines from a checkpoint in `root`; returns the user's state. See `Engine.load`. A collective."""
    paths = on_rank_0(model.everyone, lambda: candidates(locate(root), tag, fallback, missing_ok))
    for path in paths:
        try:
            return _load_one(model, path)
        except DamagedError as error:
            if path == paths[-1]:
                raise
            if model.everyone.rank == 0:
                _LOG.warning("%s; trying the next older checkpoint", error)
    return None


@dataclass(frozen=True)
class CheckpointContents:
    """A checkpoint that fits an engine, decoded: everything but the tensors that are cut into shards."""

    manifest: Manifest
    training: Mapping[str, Any]
    rng: Any
    state: Any


def _load_one(model: ModelParts, path: Location) -> Any:
    comm = model.everyone
    # All checks pass on all ranks before the engine changes, so a checkpoint that does not fit leaves it as it was:
    # test_a_checkpoint_of_another_model_is_refused.
    on_rank_0(comm, lambda: _check_files(path))
    contents = on_all_ranks(comm, lambda: _read_fitting(model, path))
    for engine in model.engines:
        engine.zero_grad()
    with CheckpointReader(path, contents.manifest) as reader:
        on_all_ranks(comm, lambda: _restore(model, reader, contents))
    for engine in model.engines:
        for unit in engine.units:
            unit.weights.refresh()
    return contents.state


def _check_files(path: Location) -> None:
    manifest = read_manifest(path)
    if missing := missing_files(path):
        raise DamagedError(f"{path / missing[0]} is missing or cut short: {REMEDY}")
    with CheckpointReader(path, manifest) as reader:
        reader.check_headers()


def _read_fitting(model: ModelParts, path: Location) -> CheckpointContents:
    """The contents; a CheckpointError names the first parameter, buffer or option that does not fit the engines."""
    tied, units = model.tied, [unit for engine in model.engines for unit in engine.units]
    manifest = _in_the_same_wrappers(
        read_manifest(path), [*model.names, *(name for unit in units for name in unit.names), *model.buffers]
    )
    frozen = {name for unit in units if not unit.is_trainable for name in unit.names}
    kept = {name for name in frozen if tied.get(name, name) in manifest.left_out}  # the model's own values
    shapes = {slot.spec.name: slot.spec.whole_shape for unit in units for slot in unit.layout.slots}
    shapes = {name: shape for name, shape in shapes.items() if name not in kept}
    buffers = {name: tuple(buffer.shape) for name, buffer in model.buffers.items()}
    stored = [key.removeprefix("buffer/") for key in manifest.tensors if key.startswith("buffer/")]
    _check_names("parameter", [tied.get(name, name) for name in shapes], manifest.params, model.names, path)
    _check_names("buffer", buffers, stored, model.names, path)
    manifest = manifest.with_tied(tied)
    wanted = {f"{PARAM}/{name}": shape for name, shape in shapes.items()}
    wanted |= {f"buffer/{name}": shape for name, shape in buffers.items()}
    for key, shape in wanted.items():
        seen = manifest.tensors[key].shape
        if seen != shape:
            raise CheckpointError(f"{path} is of another model: {key} has shape {list(seen)} there, {list(shape)} here")
    with CheckpointReader(path, manifest) as reader:
        contents = _decode(model, reader)
        check_steps(manifest, _state_dtypes(manifest), str(path))
        for engine in model.engines:
            _check_optimizer(engine, contents, path)
            for unit in engine.units if engine.optimizer is not None else ():
                _check_extras(unit, reader)
    return contents


def _in_the_same_wrappers(manifest: Manifest, here: Collection[str]) -> Manifest:
    """The same with this model's names, if only one of them has a wrapper around a module, such as `torch.compile`."""
    inside = {short: name for name, short in underlying_names(here).items()}
    stored = [*manifest.params, *(key.removeprefix("buffer/") for key in manifest.tensors if key.startswith("buffer/"))]
    there = underlying_names([*stored, *manifest.left_out])
    return manifest.renamed({name: inside[short] for name, short in there.items() if inside.get(short, name) != name})


def _check_extras(unit: Unit, reader: CheckpointReader) -> None:
    for span in piece_spans(unit) if unit.is_trainable else ():
        for key, value in _extras_of(unit, span, reader).items():
            check_extra(key, value, f"{reader.folder}: {key} of the optimizer's state of {unit.name}")


def _decode(model: ModelParts, reader: CheckpointReader) -> CheckpointContents:
    manifest, source = reader.manifest, str(reader.folder / MANIFEST)
    training = from_plain(manifest.training, reader.whole)
    checked = validated(TrainingState, training, f"{source} (training)", DamagedError, REMEDY)
    if checked.steps != manifest.steps:
        raise DamagedError(f"{source} says {manifest.steps} steps and {checked.steps} steps: {REMEDY}")
    rng = None
    if manifest.layout == model.layout and manifest.ranks:
        rng = from_plain(manifest.ranks[model.everyone.rank], reader.whole)
    if rng is not None:
        check_rng_states(rng, model.first.comm.device, source)
    return CheckpointContents(manifest, training, rng, from_plain(manifest.state, reader.whole))


def _check_names(
    what: str, here: Collection[str], there: Collection[str], elsewhere: Collection[str], path: Location
) -> None:
    """Names that are `elsewhere` are of stages that other ranks check."""
    missing = [name for name in here if name not in there]
    surplus = [name for name in there if name not in here and name not in elsewhere]
    if missing:
        near = difflib.get_close_matches(missing[0], surplus, n=1)
        hint = f"; it has {near[0]!r}" if near else ""
        raise CheckpointError(f"{path} is of another model: it has no {what} {missing[0]!r}{hint}")
    if surplus:
        raise CheckpointError(f"{path} is of another model: this one has no {what} {surplus[0]!r}")


def _check_optimizer(engine: Checkpointable, contents: CheckpointContents, path: Location) -> None:
    manifest, groups, schedule = contents.manifest, contents.training["groups"], contents.training["lr_scheduler"]
    if engine.optimizer is None or groups is None:
        return
    kind = optimizer_name(engine.optimizer)
    if manifest.optimizer is not None and manifest.optimizer != kind:
        raise CheckpointError(f"{path} was saved with the optimizer {manifest.optimizer}; this engine has {kind}")
    if len(groups) != len(engine.optimizer.param_groups):
        raise CheckpointError(
            f"{path} has {len(groups)} parameter groups; the optimizer has {len(engine.optimizer.param_groups)}"
        )
    check_groups(groups, engine.optimizer, str(path))
    if engine.lr_scheduler is not None and schedule is not None:
        check_schedule(schedule, engine.lr_scheduler, len(groups), str(path))
    for unit in engine.units:
        for slot in unit.layout.slots if unit.is_trainable else ():
            saved = manifest.params[slot.spec.name].group
            if saved not in (None, slot.spec.group):
                raise CheckpointError(
                    f"{path} has {slot.spec.name!r} in parameter group {saved}; the optimizer has it in group "
                    f"{slot.spec.group}"
                )


def _restore(model: ModelParts, reader: CheckpointReader, contents: CheckpointContents) -> None:
    """Read everything that this rank owns."""
    manifest = reader.manifest
    dtypes = _state_dtypes(manifest)
    for engine in model.engines:
        for unit in engine.units:
            if engine.optimizer is not None and unit.is_trainable:
                _prepare_states(unit, engine.optimizer, reader, dtypes)
            _restore_unit(unit, engine.optimizer, reader)
    for name, buffer in model.buffers.items():
        own = f"rank-{model.everyone.rank}/buffer/{name}"
        key = own if manifest.layout == model.layout and own in manifest.tensors else f"buffer/{name}"
        with torch.no_grad():
            buffer.copy_(reader.whole(key))
    for engine in model.engines:
        _restore_training(engine, contents.training)
    if contents.rng is not None:
        set_rng_states(contents.rng, model.first.comm.device)


def _restore_unit(unit: Unit, optimizer: torch.optim.Optimizer | None, reader: CheckpointReader) -> None:
    for view in state_views(unit, optimizer):
        for slot, part in overlaps(unit, view.span):
            stored = reader.manifest.tensors.get(f"{view.key}/{slot.spec.name}")
            if stored is None:
                continue  # an average that the checkpoint lacks: `Engine.set_progress` starts it anew
            for elements, values in reader.parts(stored, part.shift(-slot.span.start), slot.spec.part):
                view.write(elements.shift(slot.span.start), values)


def _state_dtypes(manifest: Manifest) -> dict[str, dict[str, torch.dtype]]:
    """The dtypes of the stored optimizer state, by parameter and key."""
    dtypes: dict[str, dict[str, torch.dtype]] = {name: {} for name in manifest.params}
    for full_key, stored in manifest.tensors.items():
        if full_key.startswith("optim/"):
            _, key, name = full_key.split("/", 2)
            dtypes[name][key] = stored.torch_dtype
    return dtypes


def _prepare_states(
    unit: Unit,
    optimizer: torch.optim.Optimizer,
    reader: CheckpointReader,
    dtypes: Mapping[str, Mapping[str, torch.dtype]],
) -> None:
    """Allocate the optimizer's state of a unit, and set the values that are not one per element."""
    for span in piece_spans(unit):
        prepare(unit, optimizer, span, _common({name: dtypes[name] for name in _updated_at(unit, span)}))
        for key, value in _extras_of(unit, span, reader).items():
            set_extra(unit, optimizer, span, key, value)


def _extras_of(unit: Unit, span: Span, reader: CheckpointReader) -> dict[str, Any]:
    """The values that are not one per element, of the parameters that are updated together at `span`."""
    extras = _common({name: reader.manifest.params[name].extras for name in _updated_at(unit, span)})
    return {key: from_plain(value, reader.whole) for key, value in extras.items()}


def _updated_at(unit: Unit, span: Span) -> list[str]:
    """The parameters that are updated together at `span`; for padding alone, the one before it, whose state it shares:
    fused SGD refuses momentum of some pieces and none of others."""
    names = [slot.spec.name for slot, _ in overlaps(unit, span)]
    before = [slot.spec.name for slot in unit.layout.slots if slot.span and slot.span.start < span.start]
    return names or before[-1:]


def _common(states: Mapping[str, Mapping[str, T]]) -> Mapping[str, T]:
    """The state that all parameters have that are updated together; a CheckpointError if they differ."""
    first, common = next(iter(states.items()), ("", {}))
    for name, state in states.items():
        if state != common:
            raise CheckpointError(
                f"the optimizer's state of {name!r} ({sorted(state) or 'none'}) differs from that of {first!r} "
                f"({sorted(common) or 'none'}), which is updated together with it: put them into separate groups"
            )
    return common


def _restore_training(engine: Checkpointable, training: Mapping[str, Any]) -> None:
    engine.set_progress(training)
    if engine.optimizer is not None and training["groups"] is not None:
        for group, options in zip(engine.optimizer.param_groups, training["groups"], strict=True):
            group.update(options)
    if engine.lr_scheduler is not None and training["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(training["lr_scheduler"])
