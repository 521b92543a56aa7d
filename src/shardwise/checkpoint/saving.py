"""Saving: every rank writes its own file, and rank 0 the manifest, which makes the folder a checkpoint.

`save` does this at once. `AsyncSave` does it in a thread, from a copy in host memory, while training continues. The
thread calls no collective, which could be mixed up with those of training: ranks see each other's progress in the
folder, where rank 0 waits for every rank's table and commits.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from shardwise.checkpoint.checkpointable import ModelParts, on_all_ranks, on_rank_0
from shardwise.checkpoint.contents import RankContents, contents_of, group_options, own_buffers
from shardwise.checkpoint.files import write_tensors
from shardwise.checkpoint.folder import CheckpointDraft, check_tag, keep_newest, writing
from shardwise.checkpoint.manifest import Manifest, StoredRange
from shardwise.checkpoint.object_store import locate, storage_of
from shardwise.checkpoint.storage import Location, Storage
from shardwise.comm.model_group import Everyone
from shardwise.errors import CheckpointError
from shardwise.files import parse_json
from shardwise.optim.states import PARAM
from shardwise.tensors import dtype_name

LAST_WAIT_S = 60.0
FAILED_WAIT_S = 5.0
"""How long rank 0 waits, when its program ends, for other ranks whose files do not grow: they may have been killed."""
_LOG = logging.getLogger("shardwise")


def prepare(
    model: ModelParts,
    root: str | Location,
    tag: str | None,
    state: Any,
    keep: int | None,
    staged: bool,
    frozen: bool = True,
    midway: bool = False,
) -> CheckpointWrite:
    """Agree on a checkpoint and collect what each rank writes, copied to host memory if `staged`. A collective.

    Without `frozen`, the values of frozen parameters are left out. With `midway`, gradients may be accumulated; they
    are not saved.
    """
    comm, own_tag = model.everyone, f"step-{model.first.steps}"
    on_all_ranks(comm, lambda: _check(model, tag, keep, midway))
    if model.pp > 1:
        _check_groups(model)
    draft = on_rank_0(comm, lambda: CheckpointDraft.begin(locate(root), tag if tag is not None else own_tag))
    try:
        buffers = own_buffers(model)
        contents = on_all_ranks(comm, lambda: contents_of(model, state, buffers, staged, frozen))
        return CheckpointWrite(draft, contents, comm.rank, comm.world_size, keep)
    except BaseException:
        if comm.rank == 0:
            draft.discard()
        raise


def save(write: CheckpointWrite, comm: Everyone | None) -> None:
    """Write and commit a checkpoint. A collective, or the work of one process without `comm`."""
    try:
        on_all_ranks(comm, write.write)
        on_rank_0(comm, write.commit)
    except BaseException:
        write.discard()
        raise


@dataclass(frozen=True)
class CheckpointWrite:
    """One rank's part in writing a checkpoint. Ranks exchange tables through files in the draft."""

    draft: CheckpointDraft
    contents: RankContents
    rank: int
    world_size: int
    keep: int | None = None

    def write(self) -> None:
        """Write this rank's file, then a table of its tensors."""
        contents, path = self.contents, self.draft.path / f"rank-{self.rank:05d}.safetensors"
        with writing(path, sum(each.size_bytes for each in contents.slices)):
            writer, offsets = write_tensors(path, contents.slices)
        table = table_of(contents, path.name, writer.size_bytes, writer.checksums, offsets)
        # The table appears complete, and after the file's bytes are durable: in an asynchronous save, rank 0 commits
        # as soon as it sees all tables (test_kills_at_random_moments_lose_nothing).
        text = json.dumps(table).encode()
        with writing(self._table(self.rank), len(text)):
            self._storage.put(self._table(self.rank), text)
        contents.slices.clear()  # frees the staged copies

    def commit(self) -> None:
        """On rank 0, when all tables exist: write the manifest and make the folder a checkpoint."""
        manifest = compose(self.draft, self.contents.head, self._read_tables())
        self._storage.delete(self._tables)
        self.draft.commit(manifest)
        if self.keep is not None:
            # Only now: a save that fails removes no older checkpoint.
            keep_newest(self.draft.root, self.keep)

    def discard(self) -> None:
        """Remove the draft, unless it has become a checkpoint. Not to be called during `commit`.

        Only rank 0 removes it, because only rank 0 commits. Another rank that fails cannot know whether the commit has
        begun (test_a_rank_that_fails_does_not_remove_what_rank_0_commits).
        """
        if self.rank == 0:
            self.draft.discard()

    def is_written(self) -> bool:
        """Whether every rank's part is complete."""
        return {table.name for table in self._tables} <= self._storage.names(self.draft.path)

    @property
    def poll_s(self) -> float:
        """Seconds between two looks at what other ranks have written."""
        return self._storage.poll_s * max(1.0, self.world_size / 32)

    def _read_tables(self) -> list[dict[str, Any]]:
        try:
            texts = self._storage.read(self._tables)
        except FileNotFoundError:
            there = self._storage.names(self.draft.path)
            rank = next(rank for rank, table in enumerate(self._tables) if table.name not in there)
            raise CheckpointError(
                f"rank {rank} wrote to {self.draft.path}, but rank 0 does not see its file: checkpoints need a file "
                "system that all ranks share"
            ) from None
        return [
            parse_json(text.decode(errors="replace"), str(table), CheckpointError, "save again")
            for text, table in zip(texts, self._tables, strict=True)
        ]

    @property
    def _storage(self) -> Storage:
        return storage_of(self.draft.path)

    @property
    def _tables(self) -> list[Location]:
        return [self._table(rank) for rank in range(self.world_size)]

    def _table(self, rank: int) -> Location:
        return self.draft.path / f"rank-{rank:05d}.json"


class AsyncSave:
    """One asynchronous save: a thread writes this rank's part, and on rank 0 commits.

    `last_wait_s` bounds how long rank 0 waits for ranks whose files do not grow, once its program ends; if a rank is
    known to be gone, it is `FAILED_WAIT_S`.
    """

    def __init__(self, write: CheckpointWrite, comm: Everyone, last_wait_s: float = LAST_WAIT_S) -> None:
        self._write = write
        self._comm = comm
        self._last_wait_s = last_wait_s
        self._stop = threading.Event()
        self._leaving = threading.Event()
        self._written: Future[None] = Future()
        self._committed: Future[None] = Future()
        # Neither a daemon thread nor an executor: Python waits for a plain thread before it exits
        # (test_a_program_that_ends_completes_its_save), and an executor refuses work by then.
        self._thread = threading.Thread(target=self._run, name="shardwise-save")
        self._thread.start()

    def finish(self) -> None:
        """Wait until the checkpoint exists; a CheckpointError on all ranks if the save failed. A collective."""
        try:
            on_all_ranks(self._comm, self._written.result)
            on_rank_0(self._comm, self._committed.result)
        finally:
            self._stop.set()
            self._end()

    def leave(self) -> None:
        """Wait for this rank's part, without the other ranks: for an engine that is destroyed, maybe after an error."""
        self._leaving.set()
        self._end()

    def _end(self) -> None:
        # The thread ends before the draft is discarded: it may be committing
        # (test_an_interrupt_while_a_commit_is_under_way_leaves_it_whole).
        self._thread.join()
        self._write.discard()

    def _run(self) -> None:
        _resolve(self._written, self._write.write)
        if self._comm.rank == 0 and not self._written.exception():
            _resolve(self._committed, self._commit)

    def _commit(self) -> None:
        size_bytes, grown = -1, math.inf
        while not self._write.is_written():
            if self._leaving.is_set() or not threading.main_thread().is_alive():
                before, size_bytes = size_bytes, self._write.draft.size_bytes()
                grown = grown if size_bytes == before else time.monotonic()
            wait_s = min(FAILED_WAIT_S, self._last_wait_s) if self._comm.has_failed else self._last_wait_s
            if self._stop.is_set() or time.monotonic() > grown + wait_s:
                self._write.discard()
                raise CheckpointError(f"not all ranks wrote their part of {self._write.draft.target}")
            time.sleep(self._write.poll_s)
        self._write.commit()


def _resolve(future: Future[None], work: Callable[[], None]) -> None:
    try:
        work()
    except BaseException as error:
        # Logged at once: the call that raises it may come hours later.
        _LOG.error("an asynchronous save failed: %s", error)
        future.set_exception(error)
    else:
        future.set_result(None)


def table_of(
    contents: RankContents, name: str, size_bytes: int, checksums: Sequence[int], offsets: Sequence[int]
) -> dict[str, Any]:
    """What a rank tells rank 0 about its file: where each of its tensors begins there, and how to verify it."""
    crc32 = "".join(f"{checksum:08x}" for checksum in checksums)
    tensors = [
        (each.key, dtype_name(each.dtype), each.shape, each.elements.start, each.elements.stop, offset, each.cut)
        for each, offset in zip(contents.slices, offsets, strict=True)
    ]
    file = {"name": name, "size_bytes": size_bytes, "crc32": crc32}
    facts = {"extras": contents.extras, "params": contents.params, "rng": contents.rng}
    return {"file": file, **facts, "tensors": tensors}


def compose(draft: CheckpointDraft, head: Mapping[str, Any], tables: Sequence[Mapping[str, Any]]) -> Manifest:
    """The manifest of a checkpoint whose ranks wrote these tables."""
    extras = {name: values for table in tables for name, values in table["extras"].items()}
    found = {name: param for table in tables for name, param in table["params"].items()}
    places = {name: place for place, name in enumerate(head.get("order", ()))}
    ordered = sorted(found.items(), key=lambda item: places.get(item[0], 0))
    params = {name: {**param, "extras": extras.get(name, {})} for name, param in ordered if param is not None}
    left_out = [name for name, param in ordered if param is None]
    # A parameter without elements is in no table, but is listed too.
    tensors: dict[str, dict[str, Any]] = {
        f"{PARAM}/{name}": {"dtype": param.pop("dtype"), "shape": param.pop("shape"), "pieces": []}
        for name, param in params.items()
    }
    for number, table in enumerate(tables):
        for key, dtype, shape, start, stop, offset, cut in table["tensors"]:
            stored = tensors.setdefault(key, {"dtype": dtype, "shape": shape, "pieces": []})
            stored["cut"] = cut
            if stop > start:
                stored["pieces"].append(StoredRange(number, start, stop, offset))
    for stored in tensors.values():
        stored["pieces"].sort(key=lambda piece: piece.start)
    files, ranks = [table["file"] for table in tables], [table["rng"] for table in tables]
    own = {"tag": draft.tag, "serial": draft.serial, "files": files, "ranks": ranks, "left_out": left_out}
    given = {key: value for key, value in head.items() if key != "order"}
    manifest = Manifest.model_validate({**given, **own, "params": params, "tensors": tensors})
    manifest.check()
    return manifest


def _check_groups(model: ModelParts) -> None:
    """All stages of a pipeline have the same parameter groups: a checkpoint has one list of options. A collective."""
    groups = [engine.optimizer.param_groups for engine in model.engines if engine.optimizer is not None]
    mine = [repr([group_options(group) for group in each]) for each in groups]
    everyone = model.everyone.share_object(mine, "checkpoint, parameter groups")
    if len({text for each in everyone for text in each}) > 1:
        raise CheckpointError(
            "the stages' optimizers have different parameter groups, and a checkpoint of a pipeline has one list of "
            "options for all: pass an optimizer callable that makes the same groups of any parameters, in one order"
        )


def _check(model: ModelParts, tag: str | None, keep: int | None, midway: bool) -> None:
    if tag is not None:
        check_tag(tag)
    if keep is not None and keep < 1:
        raise CheckpointError(f"keep is {keep}: it counts the newest checkpoint and is at least 1")
    if not midway and not all(engine.is_at_rest for engine in model.engines):
        raise CheckpointError(
            "the engine is in the middle of an accumulation, whose gradients a checkpoint does not hold: save after "
            "the engine.step() that updates"
        )


class Saver:
    """Saves a model, at once or in the background: then until the next save, `finish` or `leave`."""

    def __init__(self) -> None:
        self._under_way: AsyncSave | None = None

    def save(
        self,
        model: ModelParts,
        root: str | Location,
        tag: str | None,
        blocking: bool,
        state: Any,
        keep: int | None,
        frozen: bool,
        midway: bool = False,
    ) -> Location:
        """Save after what is under way; see `Engine.save`. A collective."""
        self.finish()
        write = prepare(model, root, tag, state, keep, not blocking, frozen, midway)
        if blocking:
            save(write, model.everyone)
        else:
            self._under_way = AsyncSave(write, model.everyone)
        return write.draft.target

    def finish(self) -> None:
        """Wait until what is under way is complete; raise what went wrong. A collective."""
        saving, self._under_way = self._under_way, None
        if saving is not None:
            saving.finish()

    def leave(self) -> None:
        """Wait for this rank's part of what is under way, without the other ranks."""
        saving, self._under_way = self._under_way, None
        if saving is not None:
            saving.leave()
