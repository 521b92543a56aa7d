"""Loading: every rank reads what it owns, from whichever files hold it, into the engine as it is placed now."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint import rng
from shardwise.checkpoint.contents import overlaps, persistent_buffers
from shardwise.checkpoint.files import Reader
from shardwise.checkpoint.fit import check_fit
from shardwise.checkpoint.folder import candidates, is_empty, missing_files
from shardwise.checkpoint.manifest import Manifest, Stored, read_manifest
from shardwise.checkpoint.plain import from_plain
from shardwise.checkpoint.together import first, together
from shardwise.errors import CheckpointError, DamagedError
from shardwise.optim.states import piece_spans, prepare, set_extra, state_views
from shardwise.unit.unit import Unit

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine

_LOG = logging.getLogger("shardwise")


def load(engine: Engine, root: Path, tag: str, fallback: bool, missing_ok: bool) -> Any:
    """See `Engine.load`."""
    paths = first(engine.comm, lambda: [] if missing_ok and is_empty(root) else candidates(root, tag, fallback))
    if not paths:
        return None
    for path in paths:
        try:
            return _load_one(engine, path)
        except DamagedError as error:
            if path == paths[-1]:
                raise
            if engine.comm.rank == 0:
                _LOG.warning("%s; trying the next older checkpoint", error)
    raise AssertionError("there is at least one candidate")


def _load_one(engine: Engine, path: Path) -> Any:
    """Nothing of the engine changes before the checkpoint is known to fit and its files have their sizes."""
    comm = engine.comm
    first(comm, lambda: _check_files(path))
    manifests: list[Manifest] = []
    together(comm, lambda: manifests.append(_read_fitting(engine, path)))
    manifest = manifests[0]
    engine.zero_grad()
    results: list[Any] = []
    with Reader(path, manifest) as reader:
        together(comm, lambda: results.append(_restore(engine, reader)))
    for unit in engine.units:
        unit.weights.refresh()
    return results[0]


def _check_files(path: Path) -> None:
    missing = missing_files(path)
    if missing:
        read_manifest(path)  # says what is wrong, if it is the manifest
        raise DamagedError(f"{path / missing[0]} is missing or cut short")


def _read_fitting(engine: Engine, path: Path) -> Manifest:
    manifest = read_manifest(path)
    check_fit(engine, manifest, path)
    return manifest


def _restore(engine: Engine, reader: Reader) -> Any:
    """Read everything that this rank owns; the user's state."""
    manifest, comm = reader.manifest, engine.comm
    states = _states_by_param(manifest)
    for unit in engine.units:
        if engine.optimizer is not None and unit.is_trainable:
            _prepare_states(unit, engine.optimizer, reader, states)
        for held in state_views(unit, engine.optimizer):
            for slot, part in overlaps(unit, held.span):
                stored = manifest.tensors.get(f"{held.key}/{slot.spec.name}")
                if stored is None:
                    continue  # an average that was not kept when this was saved: `Engine.set_progress` begins it anew
                for elements, values in reader.parts(stored, part.shift(-slot.span.start)):
                    held.write(elements.shift(slot.span.start), values)
    same_ranks = manifest.world_size == comm.world_size
    for name, buffer in persistent_buffers(engine.module).items():
        own = f"rank-{comm.rank}/buffer/{name}"
        is_own = same_ranks and own in manifest.tensors
        with torch.no_grad():
            buffer.copy_(reader.whole(own if is_own else f"buffer/{name}"))
    _restore_training(engine, from_plain(manifest.training, reader.whole))
    if same_ranks and manifest.ranks[comm.rank] is not None:
        rng.restore(from_plain(manifest.ranks[comm.rank], reader.whole), comm.device)
    return from_plain(manifest.state, reader.whole)


def _states_by_param(manifest: Manifest) -> dict[str, dict[str, Stored]]:
    """The stored optimizer state of each parameter."""
    states: dict[str, dict[str, Stored]] = {name: {} for name in manifest.params}
    for full_key, stored in manifest.tensors.items():
        kind, _, rest = full_key.partition("/")
        key, _, name = rest.partition("/")
        if kind == "optim":
            states[name][key] = stored
    return states


def _prepare_states(
    unit: Unit, optimizer: torch.optim.Optimizer, reader: Reader, states: Mapping[str, Mapping[str, Stored]]
) -> None:
    """Make room for the state of each piece, and set what is not one per element."""
    for span in piece_spans(unit):
        names = [slot.spec.name for slot, _ in overlaps(unit, span)]
        prepare(unit, optimizer, span, _agreed_dtypes(names, states))
        for key, value in _agreed_extras(names, reader).items():
            set_extra(unit, optimizer, span, key, value)


def _agreed_dtypes(names: list[str], states: Mapping[str, Mapping[str, Stored]]) -> dict[str, torch.dtype]:
    kinds = [{key: stored.torch_dtype for key, stored in states[name].items()} for name in names]
    for name, kind in zip(names, kinds, strict=True):
        if kind != kinds[0]:
            raise CheckpointError(
                f"the optimizer has {sorted(kind) or 'no state'} for {name!r} but {sorted(kinds[0]) or 'no state'} for "
                f"{names[0]!r}, which is updated together with it: put them into parameter groups of their own"
            )
    return kinds[0] if kinds else {}


def _agreed_extras(names: list[str], reader: Reader) -> dict[str, Any]:
    plain = [reader.manifest.params[name].extras for name in names]
    for name, extras in zip(names, plain, strict=True):
        if extras != plain[0]:
            raise CheckpointError(
                f"the optimizer's {sorted(extras)} of {name!r} differ from those of {names[0]!r}, which is updated "
                "together with it: put them into parameter groups of their own"
            )
    return {key: from_plain(value, reader.whole) for key, value in plain[0].items()} if plain else {}


def _restore_training(engine: Engine, training: Mapping[str, Any]) -> None:
    engine.set_progress(training)
    if engine.optimizer is not None and training["groups"] is not None:
        for group, options in zip(engine.optimizer.param_groups, training["groups"], strict=True):
            group.update(options)
    if engine.lr_scheduler is not None and training["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(training["lr_scheduler"])
