"""`shardwise inspect`: describe a checkpoint, or a folder of checkpoints, in words."""

from __future__ import annotations

from collections import Counter
from typing import Any

from shardwise.checkpoint.folder import list_checkpoints, missing_files, verify
from shardwise.checkpoint.manifest import Manifest, read_manifest
from shardwise.checkpoint.object_store import storage_of
from shardwise.checkpoint.storage import MANIFEST, Location
from shardwise.errors import CheckpointError
from shardwise.optim.states import PARAM
from shardwise.sizes import format_bytes, format_count


def describe(path: Location, verified: bool = False) -> str:
    """One checkpoint in detail, or a line for each checkpoint in a folder; `verified` reads every byte."""
    if MANIFEST in storage_of(path).names(path):
        return _details(path, verified)
    entries = list_checkpoints(path)
    if not entries:
        raise CheckpointError(
            f"there is no checkpoint in {path}: name the folder that engine.save wrote to; `shardwise train` writes to "
            "`checkpoints` in the folder of the run"
        )
    return "\n".join(_line(entry.path, verified) for entry in entries)


def summary(path: Location) -> dict[str, Any]:
    """The main facts of one checkpoint as plain values."""
    manifest = read_manifest(path)
    bytes_by_kind: Counter[str] = Counter()
    for key, stored in manifest.tensors.items():
        kind = key.split("/")[1] if key.startswith(("optim/", "rank-")) else key.split("/")[0]
        bytes_by_kind[kind] += stored.numel * stored.torch_dtype.itemsize
    return {
        **manifest.model_dump(include={"tag", "serial", "steps", "world_size", "written_by", "optimizer"}),
        "parameters": sum(manifest.tensors[f"{PARAM}/{name}"].numel for name in manifest.params),
        "bytes": manifest.size_bytes,
        "bytes_by_kind": dict(bytes_by_kind),
        "files": [file.name for file in manifest.files],
        "missing_files": missing_files(path),
        "state": manifest.state,
    }


def _line(path: Location, verified: bool) -> str:
    try:
        manifest, state = _checked(path, verified)
    except CheckpointError as error:
        return f"{path.name}: {error}"
    size = format_bytes(manifest.size_bytes)
    return f"{path.name}: step {manifest.steps}, {manifest.world_size} ranks, {size}, {state}"


def _details(path: Location, verified: bool) -> str:
    manifest, state = _checked(path, verified)
    facts, params = summary(path), manifest.params
    frozen = [name for name, param in params.items() if param.group is None]
    dtypes = Counter(param.compute for param in params.values())
    count = format_count(facts["parameters"])
    rows = {
        "checkpoint": f"{manifest.tag} (number {manifest.serial} of its folder), by {manifest.written_by}",
        "training": f"step {manifest.steps} on {manifest.world_size} ranks, optimizer {manifest.optimizer or 'none'}",
        "model": f"{count} parameters in {len(params)} tensors, {len(frozen)} of them frozen",
        **({"left out": f"{len(manifest.left_out)} frozen tensors"} if manifest.left_out else {}),
        "computes in": ", ".join(f"{dtype} ({number})" for dtype, number in dtypes.items()),
        **{f"tied to {name}": ", ".join(param.aliases) for name, param in params.items() if param.aliases},
        "bytes": ", ".join(f"{kind} {format_bytes(size)}" for kind, size in facts["bytes_by_kind"].items()),
        "files": f"{len(manifest.files)}, {format_bytes(manifest.size_bytes)}",
        "state": state,
    }
    width = max(len(label) for label in rows)
    return "\n".join(f"{label:<{width}}  {text}" for label, text in rows.items())


def _checked(path: Location, verified: bool) -> tuple[Manifest, str]:
    """The manifest of a checkpoint, and whether its files are there, in words."""
    manifest = verify(path) if verified else read_manifest(path)
    missing = ", ".join(missing_files(path))
    return manifest, f"missing or cut short: {missing}" if missing else "verified" if verified else "complete"
