"""Saving: every rank writes its own file, rank 0 the manifest, and a rename makes it a checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.checkpoint.contents import Contents, contents_of, own_buffers
from shardwise.checkpoint.files import write_tensors
from shardwise.checkpoint.folder import Draft, check_tag, keep_newest, writing
from shardwise.checkpoint.manifest import Manifest, ParamInfo, Stored, StoredFile
from shardwise.checkpoint.plain import dtype_name
from shardwise.checkpoint.ranges import Piece
from shardwise.checkpoint.together import first, together
from shardwise.comm.comm import Comm
from shardwise.errors import CheckpointError
from shardwise.optim.states import MASTER

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine


def prepare(engine: Engine, root: Path, tag: str | None, state: Any, keep: int | None, staged: bool) -> Job:
    """Agree on a checkpoint and on what each rank writes, copied to host memory if `staged`. A collective."""
    comm = engine.comm
    together(comm, lambda: _check(engine, tag, keep))
    draft = first(comm, lambda: Draft.begin(root, tag if tag is not None else f"step-{engine.steps}"))
    job = Job(draft, comm.rank, comm.world_size, keep)
    buffers = own_buffers(engine)

    def take() -> None:
        contents = contents_of(engine, state, buffers)
        job.contents = contents.staged(comm.device) if staged else contents

    try:
        together(comm, take)
    except BaseException:
        job.discard()
        raise
    return job


def save(job: Job, comm: Comm) -> None:
    """Write it now. A collective."""
    try:
        together(comm, job.write)
        first(comm, job.commit)
    except BaseException:
        job.discard()
        raise


class Job:
    """One rank's share of writing a checkpoint. What the parts hold meets in files beside them, not in memory."""

    def __init__(self, draft: Draft, rank: int, world_size: int, keep: int | None) -> None:
        self.draft = draft
        self.contents: Contents
        self._rank = rank
        self._world_size = world_size
        self._keep = keep

    def write(self) -> None:
        """Write this rank's file, then a table of what is in it, which tells that it is complete."""
        contents, path = self.contents, self.draft.path / f"rank-{self._rank:05d}.safetensors"
        with writing(path):
            writer, offsets = write_tensors(path, contents.items)
        crc32 = "".join(f"{checksum:08x}" for checksum in writer.checksums)
        table = {
            "file": {"name": path.name, "size_bytes": writer.size_bytes, "crc32": crc32},
            "extras": contents.extras,
            "rng": contents.rng,
            "tensors": [
                [item.key, dtype_name(item.dtype), item.shape, item.elements.start, item.elements.stop, offset]
                for item, offset in zip(contents.items, offsets, strict=True)
            ],
        }
        unfinished = self.draft.path / f"rank-{self._rank:05d}.tmp"
        unfinished.write_text(json.dumps(table))
        os.rename(unfinished, self._table(self._rank))
        contents.items.clear()  # with it go the copies that were staged

    def commit(self) -> None:
        """On rank 0, once all tables are there: write the manifest and make the folder a checkpoint."""
        tables = []
        for rank in range(self._world_size):
            path = self._table(rank)
            try:
                tables.append(json.loads(path.read_text()))
            except FileNotFoundError:
                raise CheckpointError(
                    f"rank {rank} wrote to {path.parent}, and rank 0 does not see it: checkpoints need a file system "
                    "that all ranks share"
                ) from None
        manifest = compose(self.draft, self.contents.head, tables)
        for rank in range(self._world_size):
            self._table(rank).unlink()
        self.draft.commit(manifest)
        if self._keep is not None:
            keep_newest(self.draft.target.parent, self._keep)

    def discard(self) -> None:
        """Remove what was written, unless it has become a checkpoint; call it when no `commit` is under way.

        Rank 0 alone does, which alone commits: another rank that fails cannot know whether the commit has begun.
        """
        if self._rank == 0:
            self.draft.discard()

    def is_written(self) -> bool:
        """Whether every rank's part is complete."""
        return all(self._table(rank).exists() for rank in range(self._world_size))

    def _table(self, rank: int) -> Path:
        return self.draft.path / f"rank-{rank:05d}.json"


def compose(draft: Draft, head: dict[str, Any], tables: list[dict[str, Any]]) -> Manifest:
    """The manifest of what the ranks' tables list."""
    params = head["params"]
    found: dict[str, tuple[str, tuple[int, ...], list[Piece]]] = {}
    for name, param in params.items():
        # Listed even if it has no elements, which nobody writes.
        found[f"{MASTER}/{name}"] = (dtype_name(param["dtype"]), tuple(param["shape"]), [])
    extras: dict[str, Any] = {}
    for number, table in enumerate(tables):
        extras.update(table["extras"])
        for key, dtype, shape, start, stop, offset in table["tensors"]:
            pieces = found.setdefault(key, (dtype, tuple(shape), []))[2]
            if stop > start:
                pieces.append(Piece(number, start, stop, offset))
    manifest = Manifest(
        tag=draft.tag,
        serial=draft.serial,
        files=tuple(StoredFile(**table["file"]) for table in tables),
        ranks=tuple(table["rng"] for table in tables),
        params={
            name: ParamInfo(
                compute=param["compute"],
                aliases=tuple(param["aliases"]),
                group=param["group"],
                extras=extras.get(name, {}),
            )
            for name, param in params.items()
        },
        tensors={
            key: Stored(dtype=dtype, shape=shape, pieces=tuple(sorted(pieces, key=lambda piece: piece.start)))
            for key, (dtype, shape, pieces) in found.items()
        },
        **{key: value for key, value in head.items() if key != "params"},
    )
    manifest.check()
    return manifest


def _check(engine: Engine, tag: str | None, keep: int | None) -> None:
    if tag is not None:
        check_tag(tag)
    if keep is not None and keep < 1:
        raise CheckpointError(f"keep is {keep}: at least the newest checkpoint is kept")
    if not engine.is_at_rest:
        raise CheckpointError(
            "the engine is in the middle of an accumulation, whose gradients a checkpoint does not hold: save after "
            "the engine.step() that updates"
        )
