"""A folder of checkpoints: listing them, committing a new one, removing old ones.

A checkpoint is a folder with a manifest. It is written as a draft, which `list_checkpoints` ignores. When all of its
bytes are durable, one operation of the `storage` makes it a checkpoint. The newest checkpoint is the one with the
highest serial number. No file says which one it is, so no file can be wrong about it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import socket
import time
from dataclasses import dataclass

from shardwise import files
from shardwise.checkpoint.files import BlockReader, CheckpointReader
from shardwise.checkpoint.manifest import TAG, Manifest, head_of, read_body, read_manifest
from shardwise.checkpoint.object_store import storage_of
from shardwise.checkpoint.storage import DRAFT, MANIFEST, REMOVED, Location
from shardwise.errors import CheckpointError, DamagedError

LATEST = "latest"
_LOG = logging.getLogger("shardwise")
_OWNER = re.compile(rf"{re.escape(DRAFT)}([0-9a-f]{{12}})-([0-9]+)-")
_RANK_FILE = re.compile(r"rank-.*\.safetensors")
_ABANDONED_S = 86_400.0
"""A draft of another machine, whose processes are not visible here, is abandoned after this long without a write."""


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint in a folder; `problem` says why its manifest cannot be read, and is None if it can.

    One that cannot be read has the name of its folder as its tag, and -1 as its serial number unless that can be read.
    """

    path: Location
    tag: str
    serial: int
    problem: CheckpointError | None = None

    @property
    def is_complete(self) -> bool:
        """Whether it can be read, and all of its files have the size that was written."""
        return self.problem is None and not missing_files(self.path)


@dataclass(frozen=True)
class CheckpointDraft:
    """A checkpoint that is being written into `path`: `commit` makes it the checkpoint `target`."""

    path: Location
    target: Location
    tag: str
    serial: int
    name: str

    @classmethod
    def begin(cls, root: Location, tag: str) -> CheckpointDraft:
        """Begin to write a checkpoint. Removes the drafts of processes that were killed."""
        check_tag(tag)
        storage = storage_of(root)
        with writing(root):
            for draft, last_write in storage.drafts(root).items():
                if _is_abandoned(draft, last_write):
                    storage.drop(root, draft)
            serial = 1 + max((entry.serial for entry in list_checkpoints(root)), default=0)
            name = f"{DRAFT}{_host()}-{os.getpid()}-{tag}-{serial}-{os.urandom(4).hex()}"
            # The old checkpoint of the same tag keeps its name: `commit` removes it after the new one exists
            # (test_the_same_tag_again_replaces_the_old_one_after_the_new_one_is_there).
            taken = {path.name for path in storage.folders(root)} | storage.unfinished(root)
            names = (tag, f"{tag}.{serial}", f"{tag}.{serial}-{os.urandom(4).hex()}")
            target = root / next(each for each in names if each not in taken)
            return cls(storage.begin(root, name, target), target, tag, serial, name)

    @property
    def root(self) -> Location:
        return self.target.parent

    def commit(self, manifest: Manifest) -> None:
        """Turn the draft into a checkpoint. Until then, `load` does not see it; from then on it is complete.

        Older checkpoints of the same tag are removed only after the new one is durable. So a kill or a power failure
        leaves the old or the new one (test_kills_at_random_moments_lose_nothing).
        """
        storage = storage_of(self.path)
        sizes = storage.sizes(self.path)
        for file in manifest.files:
            if sizes.get(file.name) != file.size_bytes:
                raise CheckpointError(
                    f"{self.path / file.name} has {sizes.get(file.name)} bytes where {file.size_bytes} were written: "
                    "all ranks must write to one file system that rank 0 sees"
                )
        text = manifest.to_text().encode()
        with writing(self.path / MANIFEST, len(text)):
            storage.publish(self.root, self.name, self.target, text)
        # Another process may have removed files of the draft. Older checkpoints are removed only after this check:
        # test_an_old_checkpoint_stays_if_the_new_one_is_not_whole.
        if missing := missing_files(self.target):
            remove(self.target)
            raise CheckpointError(f"{missing[0]} was removed from {self.path} while it became a checkpoint: save again")
        # One that is damaged, or that a newer version wrote, stays: it may be the user's only copy, and this version
        # cannot know (test_a_save_of_the_same_tag_leaves_what_it_cannot_read).
        for entry in list_checkpoints(self.root):
            if entry.tag == self.tag and entry.serial < self.serial and entry.is_complete:
                remove(entry.path)

    def size_bytes(self) -> int:
        """The bytes written so far."""
        return sum(storage_of(self.path).sizes(self.path).values())

    def discard(self) -> None:
        """Remove the draft; does nothing after `commit`."""
        storage_of(self.path).drop(self.root, self.name)


def writing(path: Location, needed_bytes: int | None = None) -> contextlib.AbstractContextManager[None]:
    """Within it, an OSError becomes a CheckpointError that names the file. See `shardwise.files.writing`."""
    return files.writing(path, CheckpointError, needed_bytes)


def check_tag(tag: str) -> None:
    """Raise a CheckpointError unless `tag` can be the name of a checkpoint's folder."""
    if tag == LATEST or not re.fullmatch(TAG, tag):
        raise CheckpointError(
            f"{tag!r} cannot be a checkpoint's tag: use letters, digits, '.', '_' and '-', and not 'latest'"
        )


def list_checkpoints(root: Location) -> list[CheckpointEntry]:
    """The checkpoints in a folder, newest first; those whose manifest cannot be read come last."""
    storage = storage_of(root)
    drafts, entries = storage.unfinished(root), []
    for path in storage.folders(root):
        names = storage.names(path) if not path.name.startswith(".") else set()
        # A folder with a rank's file but no manifest is a damaged checkpoint, unless it is still being written.
        is_damaged = path.name not in drafts and any(_RANK_FILE.fullmatch(name) for name in names)
        if MANIFEST in names or is_damaged:
            entries.append(_entry(path))
    return sorted(entries, key=lambda entry: -entry.serial)


def candidates(root: Location, tag: str, fallback: bool, missing_ok: bool = False) -> list[Location]:
    """The paths to load from, the first choice first; with `missing_ok`, none if `root` holds no checkpoint.

    The first is `root`, if it is a checkpoint itself, or the checkpoint that `tag` names, or the newest. With
    `fallback`, all other checkpoints follow, newest first: in place of one that is damaged, never of one that is not
    there or that a newer version wrote.
    """
    if MANIFEST in storage_of(root).names(root):
        if tag not in (LATEST, root.name, _entry(root).tag):
            raise CheckpointError(f"{root} is a checkpoint, and not {tag!r}: give the folder that contains {tag!r}")
        return [root]
    entries = list_checkpoints(root)
    if missing_ok and not entries:
        return []
    readable = [entry for entry in entries if not entry.problem]
    if tag == LATEST:
        named = readable[:1]
        # A damaged manifest has no known serial number: it may be that of the newest checkpoint.
        newest = named[0].serial if named else -1
        passed = [entry for entry in entries if entry.problem and (entry.serial < 0 or entry.serial > newest)]
    else:
        named = [entry for entry in readable if entry.tag == tag][:1]
        passed = [] if named else [entry for entry in entries if entry.problem and entry.path.name == tag]
    for entry in passed:
        if not isinstance(entry.problem, DamagedError):
            raise CheckpointError(f"{entry.problem}, or give the tag of another checkpoint") from None
    if passed and not (fallback and readable):
        raise DamagedError(f"{passed[0].problem}" if readable else f"{passed[0].problem}; {root} has no other")
    if not named and not passed:
        wanted = "no checkpoint" if tag == LATEST else f"no checkpoint {tag!r}"
        present = ", ".join(repr(entry.tag) for entry in entries) or "none"
        raise CheckpointError(f"there is {wanted} in {root}; found: {present}: give another folder or tag")
    for entry in passed:
        _LOG.warning("%s; skipped for an older checkpoint", entry.problem)
    others = [entry for entry in readable if entry not in named] if fallback else []
    return [entry.path for entry in named + others]


def keep_newest(root: Location, count: int) -> None:
    """Remove all but the `count` newest complete checkpoints. Damaged ones are neither removed nor counted."""
    complete = [entry for entry in list_checkpoints(root) if entry.is_complete]
    for entry in complete[count:]:
        remove(entry.path)


def missing_files(path: Location) -> list[str]:
    """The files of a checkpoint that are absent or whose size is not the one that was written."""
    try:
        stored = read_manifest(path).files
    except CheckpointError:
        return [MANIFEST]
    sizes = storage_of(path).sizes(path)
    return [file.name for file in stored if sizes.get(file.name) != file.size_bytes]


def verify(path: Location) -> Manifest:
    """Read every byte of a checkpoint; a DamagedError names the first file that has changed."""
    manifest = read_manifest(path)
    for file in manifest.files:
        with contextlib.closing(BlockReader(path / file.name, file.size_bytes, file.checksums)) as reader:
            reader.verify()
    with CheckpointReader(path, manifest) as opened:
        opened.check_headers()
    return manifest


def remove(path: Location) -> None:
    """Delete a checkpoint. What a kill leaves of it, the next save removes."""
    storage_of(path).remove(path, f"{REMOVED}{path.name}-{os.urandom(4).hex()}")


def _entry(path: Location) -> CheckpointEntry:
    serial = -1
    try:
        body = read_body(path)
        if isinstance(body.get("serial"), int):
            serial = body["serial"]
        head = head_of(path, body)
        return CheckpointEntry(path, head.tag, head.serial)
    except CheckpointError as error:
        return CheckpointEntry(path, path.name, serial, error)


def _host() -> str:
    """This machine's name in drafts."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12]


def _is_abandoned(draft: str, last_write: float) -> bool:
    """Whether the process that wrote this draft is gone."""
    # Other processes may save into the same folder at this moment, and their drafts must stay:
    # test_leftovers_are_removed_and_never_taken_for_checkpoints.
    if draft.startswith(REMOVED):
        return True
    owner = _OWNER.match(draft)
    if owner is None:
        return False  # not ours
    if owner[1] == _host():
        return not _is_alive(int(owner[2]))
    return time.time() > last_write + _ABANDONED_S


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it exists and belongs to another user
    return True
