"""A folder of checkpoints: listing them, committing a new one by a rename, removing old ones.

A checkpoint is a folder with a manifest. It is written as `.tmp-...`, which `list_checkpoints` ignores. When all of
its bytes are durable, one rename gives it its name and makes it a checkpoint. The newest checkpoint is the one with the
highest serial number. No file says which one it is, so no file can be wrong about it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from shardwise import files
from shardwise.checkpoint.files import BlockReader, CheckpointReader
from shardwise.checkpoint.manifest import FILE_NAME, TAG, Manifest, head_of, read_body, read_manifest
from shardwise.errors import CheckpointError, DamagedError

LATEST = "latest"
_LOG = logging.getLogger("shardwise")
_TEMPORARY = ".tmp-"
_REMOVED = f"{_TEMPORARY}removed-"
_OWNER = re.compile(r"\.tmp-([0-9a-f]{12})-([0-9]+)-")
_ABANDONED_S = 86_400.0
"""A draft of another machine, whose processes are not visible here, is abandoned after this long without a write."""


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint in a folder; `problem` says why its manifest cannot be read, and is None if it can.

    One that cannot be read has the name of its folder as its tag, and -1 as its serial number unless that can be read.
    """

    path: Path
    tag: str
    serial: int
    problem: CheckpointError | None = None

    @property
    def is_complete(self) -> bool:
        """Whether it can be read, and all of its files have the size that was written."""
        return self.problem is None and not missing_files(self.path)


@dataclass(frozen=True)
class CheckpointDraft:
    """A checkpoint that is being written: `commit` renames `path` to `target`."""

    path: Path
    target: Path
    tag: str
    serial: int

    @classmethod
    def begin(cls, root: Path, tag: str) -> CheckpointDraft:
        """Make a new folder to write a checkpoint into. Removes the drafts of processes that were killed."""
        check_tag(tag)
        with writing(root):
            root.mkdir(parents=True, exist_ok=True)
        for draft in root.glob(f"{_TEMPORARY}*"):
            if _is_abandoned(draft):
                shutil.rmtree(draft, ignore_errors=True)
        serial = 1 + max((entry.serial for entry in list_checkpoints(root)), default=0)
        path = root / f"{_TEMPORARY}{_host()}-{os.getpid()}-{tag}-{serial}-{os.urandom(4).hex()}"
        with writing(path):
            path.mkdir()
        # The old checkpoint of the same tag keeps its name: `commit` removes it after the new one exists
        # (test_the_same_tag_again_replaces_the_old_one_after_the_new_one_is_there).
        target = root / tag if not (root / tag).exists() else root / f"{tag}.{serial}"
        return cls(path, target, tag, serial)

    def commit(self, manifest: Manifest) -> None:
        """Turn the draft into a checkpoint. Until the rename, `load` does not see it; from then on it is complete.

        What makes it complete is durable before the rename: the ranks' files (`BlockWriter` syncs them), the manifest,
        and the names of both. Older checkpoints of the same tag are removed only after the new name is durable. So a
        kill or a power failure leaves the old or the new one (test_kills_at_random_moments_lose_nothing).
        """
        for file in manifest.files:
            seen = _size_bytes(self.path / file.name)
            if seen != file.size_bytes:
                raise CheckpointError(
                    f"{self.path / file.name} has {seen} bytes where {file.size_bytes} were written: all ranks must "
                    "write to one file system that rank 0 sees"
                )
        text = manifest.to_text().encode()
        with writing(self.path / FILE_NAME, len(text)), (self.path / FILE_NAME).open("xb") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        with writing(self.target):
            sync_folder(self.path)
            os.rename(self.path, self.target)
            sync_folder(self.target.parent)
        # Another process may have removed files of the draft. Older checkpoints are removed only after this check:
        # test_an_old_checkpoint_stays_if_the_new_one_is_not_whole.
        if missing := missing_files(self.target):
            remove(self.target)
            raise CheckpointError(f"{missing[0]} was removed from {self.path} while it became a checkpoint: save again")
        # One that is damaged, or that a newer version wrote, stays: it may be the user's only copy, and this version
        # cannot know (test_a_save_of_the_same_tag_leaves_what_it_cannot_read).
        for entry in list_checkpoints(self.target.parent):
            if entry.tag == self.tag and entry.serial < self.serial and entry.is_complete:
                remove(entry.path)

    def size_bytes(self) -> int:
        """The bytes written so far."""
        return sum(_size_bytes(file) or 0 for file in self.path.glob("*"))

    def discard(self) -> None:
        """Remove the draft; does nothing after `commit`, which renamed it."""
        shutil.rmtree(self.path, ignore_errors=True)


def writing(path: Path, needed_bytes: int | None = None) -> contextlib.AbstractContextManager[None]:
    """Within it, an OSError becomes a CheckpointError that names the file. See `shardwise.files.writing`."""
    return files.writing(path, CheckpointError, needed_bytes)


def check_tag(tag: str) -> None:
    """Raise a CheckpointError unless `tag` can be the name of a checkpoint's folder."""
    if tag == LATEST or not re.fullmatch(TAG, tag):
        raise CheckpointError(
            f"{tag!r} cannot be a checkpoint's tag: use letters, digits, '.', '_' and '-', and not 'latest'"
        )


def list_checkpoints(root: Path) -> list[CheckpointEntry]:
    """The checkpoints in a folder, newest first; those whose manifest cannot be read come last."""
    if not root.is_dir():
        return []
    paths = [path for path in sorted(root.iterdir()) if not path.name.startswith(".") and path.is_dir()]
    # A folder with a rank's file but no manifest is a damaged checkpoint: it was complete when it got its name.
    entries = [_entry(path) for path in paths if (path / FILE_NAME).exists() or any(path.glob("rank-*.safetensors"))]
    return sorted(entries, key=lambda entry: -entry.serial)


def candidates(root: Path, tag: str, fallback: bool, missing_ok: bool = False) -> list[Path]:
    """The paths to load from, the first choice first; with `missing_ok`, none if `root` holds no checkpoint.

    The first is `root`, if it is a checkpoint itself, or the checkpoint that `tag` names, or the newest. With
    `fallback`, all other checkpoints follow, newest first: in place of one that is damaged, never of one that is not
    there or that a newer version wrote.
    """
    if (root / FILE_NAME).exists():
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


def keep_newest(root: Path, count: int) -> None:
    """Remove all but the `count` newest complete checkpoints. Damaged ones are neither removed nor counted."""
    complete = [entry for entry in list_checkpoints(root) if entry.is_complete]
    for entry in complete[count:]:
        remove(entry.path)


def missing_files(path: Path) -> list[str]:
    """The files of a checkpoint that are absent or whose size is not the one that was written."""
    try:
        stored = read_manifest(path).files
    except CheckpointError:
        return [FILE_NAME]
    return [file.name for file in stored if _size_bytes(path / file.name) != file.size_bytes]


def verify(path: Path) -> Manifest:
    """Read every byte of a checkpoint; a DamagedError names the first file that has changed."""
    manifest = read_manifest(path)
    for file in manifest.files:
        with contextlib.closing(BlockReader(path / file.name, file.size_bytes, file.checksums)) as reader:
            reader.verify()
    with CheckpointReader(path, manifest) as opened:
        opened.check_headers()
    return manifest


def remove(path: Path) -> None:
    """Delete a checkpoint."""
    # The rename comes first: a kill in the middle of rmtree must not leave half a checkpoint under its name
    # (test_kills_at_random_moments_lose_nothing). The next save removes the rest.
    hidden = path.parent / f"{_REMOVED}{path.name}-{os.urandom(4).hex()}"
    os.rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable; fsync of a file does not include its name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size_bytes(path: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError):  # a rank may rename its table at any time
        return path.stat().st_size
    return None


def _entry(path: Path) -> CheckpointEntry:
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


def _is_abandoned(draft: Path) -> bool:
    """Whether the process that wrote this draft is gone."""
    # Other processes may save into the same folder at this moment, and their drafts must stay:
    # test_leftovers_are_removed_and_never_taken_for_checkpoints.
    if draft.name.startswith(_REMOVED):
        return True
    owner = _OWNER.match(draft.name)
    if owner is None:
        return False  # not ours
    if owner[1] == _host():
        return not _is_alive(int(owner[2]))
    last_write = 0.0
    for path in (draft, *draft.glob("*")):
        with contextlib.suppress(FileNotFoundError):
            last_write = max(last_write, path.stat().st_mtime)
    return time.time() > last_write + _ABANDONED_S


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it exists and belongs to another user
    return True
