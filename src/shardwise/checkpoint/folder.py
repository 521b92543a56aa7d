"""A folder of checkpoints: finding them, committing a new one by a rename, removing old ones.

A checkpoint is a folder with a manifest. It is written as `.tmp-...`, which nobody takes for one, and exists from the
moment that folder gets its name. Everything in it was made durable before. The newest is the one with the highest
serial number; no file says which it is, so none can be wrong about it.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.blocks import BlockReader
from shardwise.checkpoint.manifest import FILE_NAME, Manifest, read_head, read_manifest
from shardwise.errors import CheckpointError, DamagedError

LATEST = "latest"
_LOG = logging.getLogger("shardwise")
_TEMPORARY = ".tmp-"
_REMOVED = f"{_TEMPORARY}removed-"
_OWNER = re.compile(r"\.tmp-([0-9a-f]{12})-([0-9]+)-")
_ABANDONED_S = 86_400.0
"""Whether a process of another machine lives cannot be seen: what nobody has touched for this long is left over."""
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True)
class Found:
    """A checkpoint in a folder; `problem` says why its manifest cannot be read."""

    path: Path
    tag: str
    serial: int
    problem: str | None = None


@dataclass(frozen=True)
class Draft:
    """A checkpoint while it is written: in `path`, to become `target`."""

    path: Path
    target: Path
    tag: str
    serial: int

    @classmethod
    def begin(cls, root: Path, tag: str) -> Draft:
        """A fresh folder for a checkpoint, with what killed processes left of theirs removed."""
        check_tag(tag)
        root.mkdir(parents=True, exist_ok=True)
        for draft in root.glob(f"{_TEMPORARY}*"):
            if _is_left_over(draft):
                shutil.rmtree(draft, ignore_errors=True)
        serial = 1 + max((found.serial for found in list_checkpoints(root)), default=0)
        path = root / f"{_TEMPORARY}{_host()}-{os.getpid()}-{tag}-{serial}-{os.urandom(4).hex()}"
        path.mkdir()
        # The same tag again: the old one goes only after the new one is there.
        target = root / tag if not (root / tag).exists() else root / f"{tag}.{serial}"
        return cls(path, target, tag, serial)

    def commit(self, manifest: Manifest) -> None:
        """Make it a checkpoint."""
        for file in manifest.files:
            seen = (self.path / file.name).stat().st_size if (self.path / file.name).exists() else None
            if seen != file.size_bytes:
                raise CheckpointError(
                    f"{self.path / file.name} has {seen} bytes where {file.size_bytes} were written: all ranks must "
                    "write to one file system that rank 0 sees"
                )
        with (self.path / FILE_NAME).open("x") as text:
            text.write(manifest.to_text())
            text.flush()
            os.fsync(text.fileno())
        sync_folder(self.path)
        os.rename(self.path, self.target)
        sync_folder(self.target.parent)
        if missing := missing_files(self.target):
            remove(self.target)
            raise CheckpointError(f"{missing[0]} was removed from {self.path} while it became a checkpoint: save again")
        for found in list_checkpoints(self.target.parent):
            if found.tag == self.tag and found.serial < self.serial:
                remove(found.path)

    def size_bytes(self) -> int:
        """What has been written so far."""
        size_bytes = 0
        for file in self.path.glob("*"):
            with contextlib.suppress(FileNotFoundError):  # a table that got its name meanwhile
                size_bytes += file.stat().st_size
        return size_bytes

    def discard(self) -> None:
        """Remove it; nothing happens once it is a checkpoint."""
        shutil.rmtree(self.path, ignore_errors=True)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the file system refuses within it becomes a CheckpointError about `path`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename or path} cannot be written: {error.strerror or error}") from error


def check_tag(tag: str) -> None:
    """A tag is the name of a folder."""
    if tag == LATEST or not _TAG.fullmatch(tag):
        raise CheckpointError(
            f"{tag!r} cannot be a checkpoint's tag: take letters, digits, '.', '_' and '-', not 'latest'"
        )


def list_checkpoints(root: Path) -> list[Found]:
    """The checkpoints in a folder, the newest first; those whose manifest cannot be read come last."""
    if not root.is_dir():
        return []
    paths = [path for path in sorted(root.iterdir()) if not path.name.startswith(".") and path.is_dir()]
    # With files but without a manifest it was one: nothing gets its name before it is complete.
    found = [look_at(path) for path in paths if (path / FILE_NAME).exists() or any(path.glob("rank-*.safetensors"))]
    return sorted(found, key=lambda each: -each.serial)


def is_empty(root: Path) -> bool:
    """Whether `root` neither is a checkpoint nor holds one."""
    return not (root / FILE_NAME).exists() and not list_checkpoints(root)


def look_at(path: Path) -> Found:
    """Tag and serial number of the checkpoint at `path`, or why they cannot be read."""
    try:
        tag, serial = read_head(path)
    except CheckpointError as error:
        return Found(path, path.name, -1, str(error))
    return Found(path, tag, serial)


def candidates(root: Path, tag: str, fallback: bool) -> list[Path]:
    """The checkpoint that `tag` names, or the newest, or `root` itself; with `fallback`, then the others by age."""
    if (root / FILE_NAME).exists():
        return [root]
    everything = list_checkpoints(root)
    damaged = [found for found in everything if found.problem]
    sound = [found for found in everything if not found.problem]
    if tag == LATEST:
        named = sound[:1]
        # Which one is the newest cannot be told while one of them cannot be read.
        problems = damaged
    else:
        named = [found for found in sound if found.tag == tag][:1]
        problems = [] if named else [found for found in damaged if found.path.name == tag]
    if problems and not fallback:
        raise DamagedError(f"{problems[0].problem}; fallback=True loads the newest complete checkpoint instead")
    if not (named or (fallback and sound)):
        wanted = "no checkpoint" if tag == LATEST else f"no checkpoint {tag!r}"
        there = ", ".join(repr(found.tag) for found in everything) or "none"
        raise CheckpointError(f"there is {wanted} in {root}; found: {there}")
    for each in problems:
        _LOG.warning("%s; passed over for an older checkpoint", each.problem)
    others = [found for found in sound if found not in named] if fallback else []
    return [found.path for found in named + others]


def keep_newest(root: Path, count: int) -> None:
    """Remove all but the `count` newest checkpoints that are whole; what is damaged is left alone and not counted."""
    whole = [found for found in list_checkpoints(root) if not found.problem and not missing_files(found.path)]
    for found in whole[count:]:
        remove(found.path)


def missing_files(path: Path) -> list[str]:
    """The files of a checkpoint that are absent or of another size than was written."""
    try:
        files = read_manifest(path).files
    except CheckpointError:
        return [FILE_NAME]
    return [file.name for file in files if not _has_size(path / file.name, file.size_bytes)]


def verify(path: Path) -> Manifest:
    """Read every byte of a checkpoint; a DamagedError names the file that is not as it was written."""
    manifest = read_manifest(path)
    for file in manifest.files:
        with contextlib.closing(BlockReader(path / file.name, file.size_bytes, file.checksums)) as reader:
            reader.verify()
    return manifest


def remove(path: Path) -> None:
    """Delete a checkpoint: it stops being one first, so that a kill leaves no half of it."""
    hidden = path.parent / f"{_REMOVED}{path.name}-{os.urandom(4).hex()}"
    os.rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _has_size(path: Path, size_bytes: int) -> bool:
    return path.exists() and path.stat().st_size == size_bytes


def _host() -> str:
    """This machine, in a folder's name."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12]


def _is_left_over(draft: Path) -> bool:
    """Whether nobody writes this draft any more: others may save into the same folder at this moment."""
    if draft.name.startswith(_REMOVED):
        return True
    owner = _OWNER.match(draft.name)
    if owner is not None and owner[1] == _host():
        return not _is_alive(int(owner[2]))
    touched = 0.0
    for path in (draft, *draft.glob("*")):
        with contextlib.suppress(FileNotFoundError):
            touched = max(touched, path.stat().st_mtime)
    return time.time() > touched + _ABANDONED_S


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it lives, as another user
    return True
