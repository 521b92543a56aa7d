"""Where checkpoints live: a folder of a file system, or an object store.

Everything that touches the medium goes through a `Storage`. What differs is how a checkpoint becomes visible at once:
a file system renames a folder; an object store has no rename, and the manifest is its last object (`object_store`).
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Protocol, TypeAlias

MANIFEST = "manifest.json"
DRAFT, REMOVED = ".tmp-", ".tmp-removed-"
"""How the names of drafts begin, and those of checkpoints that are being removed."""


class RemotePath:
    """An address such as `s3://bucket/folder/step-100`.

    >>> path = RemotePath("memory://bucket/folder/") / "step-100"
    >>> str(path), path.name, str(path.parent)
    ('memory://bucket/folder/step-100', 'step-100', 'memory://bucket/folder')
    """

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/")

    def __str__(self) -> str:
        return self._address

    def __repr__(self) -> str:
        return f"RemotePath({self._address!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(self._address)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self._address}/{name}")

    @property
    def name(self) -> str:
        return posixpath.basename(self._address)

    @property
    def parent(self) -> RemotePath:
        return RemotePath(posixpath.dirname(self._address))


Location: TypeAlias = Path | RemotePath
"""A file or folder."""


class NewFile(Protocol):
    """A file that is being written. It exists, durably, once it is `finished`."""

    def write(self, data: memoryview, /) -> int: ...

    def finish(self) -> None: ...

    def abandon(self) -> None: ...


class Storage(ABC):
    """A medium. A file that is not there is a FileNotFoundError; any other failure is an OSError."""

    poll_s: float
    """Seconds between two looks at what other ranks have written."""

    @abstractmethod
    def create(self, path: Any) -> NewFile:
        """A new file, to be written from front to back."""

    @abstractmethod
    def open(self, path: Any) -> tuple[IO[bytes], int]:
        """A file to read anywhere, and its size."""

    @abstractmethod
    def read(self, paths: Sequence[Any]) -> list[bytes]:
        """The contents of small files."""

    @abstractmethod
    def put(self, path: Any, data: bytes) -> None:
        """Write a small file, which appears complete."""

    @abstractmethod
    def delete(self, paths: Sequence[Any]) -> None:
        """Remove files."""

    @abstractmethod
    def sizes(self, folder: Any) -> dict[str, int]:
        """The files in a folder, by name; none if there is no such folder."""

    def names(self, folder: Any) -> set[str]:
        """The names of the files in a folder, maybe with those of folders."""
        return set(self.sizes(folder))

    @abstractmethod
    def folders(self, root: Any) -> list[Any]:
        """The folders in a folder, sorted by name."""

    @abstractmethod
    def begin(self, root: Any, draft: str, target: Any) -> Any:
        """Begin the checkpoint `target`, which is not visible as one until `publish`; returns where to write it.
        `draft` names who writes it, for `drafts`."""

    @abstractmethod
    def publish(self, root: Any, draft: str, target: Any, manifest: bytes) -> None:
        """Make a draft, whose other files are there, a checkpoint."""

    @abstractmethod
    def drafts(self, root: Any) -> dict[str, float]:
        """The drafts in a folder, and when each was last written to."""

    @abstractmethod
    def drop(self, root: Any, draft: str) -> None:
        """Remove a draft, if there is one. If it has become a checkpoint, that stays."""

    @abstractmethod
    def unfinished(self, root: Any) -> set[str]:
        """The folders in `root` that are drafts, although they look like checkpoints without a manifest."""

    @abstractmethod
    def remove(self, path: Any, draft: str) -> None:
        """Delete a checkpoint; `draft` is a name for what is left of it if the process is killed meanwhile."""


class FileSystem(Storage):
    """A file system that all ranks share. A draft is a folder that gets its name when it is complete."""

    poll_s = 0.02

    def create(self, path: Path) -> NewFile:
        return _LocalFile(path)

    def open(self, path: Path) -> tuple[IO[bytes], int]:
        file = open(path, "rb", opener=_open_here)  # noqa: SIM115  # until the reader closes it
        return file, os.fstat(file.fileno()).st_size

    def read(self, paths: Sequence[Path]) -> list[bytes]:
        return [path.read_bytes() for path in paths]

    def put(self, path: Path, data: bytes) -> None:
        # By a rename, so that no reader sees a part of it.
        unfinished = path.with_suffix(".tmp")
        try:
            unfinished.write_bytes(data)
        except OSError as error:  # a full disk does not say which file
            error.filename = error.filename or str(unfinished)
            raise
        os.rename(unfinished, path)

    def delete(self, paths: Sequence[Path]) -> None:
        for path in paths:
            path.unlink()

    def sizes(self, folder: Path) -> dict[str, int]:
        found = {}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # a rank may rename its table at any time
                    if not entry.is_dir():
                        found[entry.name] = entry.stat().st_size
        return found

    def names(self, folder: Path) -> set[str]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return set(os.listdir(folder))
        return set()

    def folders(self, root: Path) -> list[Path]:
        return sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []

    def begin(self, root: Path, draft: str, target: Path) -> Path:
        root.mkdir(parents=True, exist_ok=True)
        (root / draft).mkdir()
        return root / draft

    def publish(self, root: Path, draft: str, target: Path, manifest: bytes) -> None:
        # Durable before the rename: the ranks' files (`create` syncs them), the manifest, and the names of both; and
        # then the new name (test_kills_at_random_moments_lose_nothing).
        file = self.create(root / draft / MANIFEST)
        file.write(memoryview(manifest))
        file.finish()
        sync_folder(root / draft)
        os.rename(root / draft, target)
        sync_folder(root)

    def drafts(self, root: Path) -> dict[str, float]:
        return {path.name: _last_write(path) for path in root.glob(f"{DRAFT}*")}

    def drop(self, root: Path, draft: str) -> None:
        shutil.rmtree(root / draft, ignore_errors=True)

    def unfinished(self, root: Path) -> set[str]:
        return set()  # a folder got its name when it was complete

    def remove(self, path: Path, draft: str) -> None:
        # The rename comes first: a kill in the middle of rmtree must not leave half a checkpoint under its name
        # (test_kills_at_random_moments_lose_nothing).
        os.rename(path, path.parent / draft)
        self.drop(path.parent, draft)


class _LocalFile:
    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)
        self.write = self._file.write

    def finish(self) -> None:
        with self._file:
            os.fsync(self._file.fileno())

    def abandon(self) -> None:
        self._file.close()


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable; fsync of a file does not include its name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _last_write(draft: Path) -> float:
    last = 0.0
    for path in (draft, *draft.glob("*")):
        with contextlib.suppress(FileNotFoundError):
            last = max(last, path.stat().st_mtime)
    return last


def _open_here(path: str, flags: int) -> int:
    # A symbolic link could lead out of the checkpoint's folder: test_a_link_is_not_followed.
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0))
