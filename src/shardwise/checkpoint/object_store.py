"""Checkpoints in an object store, through fsspec: `s3://`, `gs://`, and any other address that fsspec knows.

    bucket/folder/.tmp-HOST-PID-...         a note that step-100 is being written; its content is that name
                  step-100/rank-00000.safetensors
                           manifest.json    the last object: with it, step-100 is a checkpoint

Objects appear whole, when their upload ends, and there is no rename. So the ranks write under the final name, and the
manifest comes last. A folder without a manifest is a draft as long as its note is there; the next save removes it when
the process that wrote the note is gone. A checkpoint is removed in the opposite order: a note, the manifest, the rest.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from shardwise.checkpoint.storage import DRAFT, MANIFEST, REMOVED, FileSystem, Location, NewFile, RemotePath, Storage
from shardwise.errors import CheckpointError

_READ_AHEAD_BYTES = 8 << 20
_PART_BYTES = 16 << 20  # S3 takes at most 10,000 parts of an object
_LOCAL = ("file", "local")
_FILE_SYSTEM = FileSystem()


class ObjectStore(Storage):
    """The store that an address leads to."""

    poll_s = 1.0

    def __init__(self, address: str) -> None:
        protocol = address.partition("://")[0]
        try:
            import fsspec

            self._files, _ = fsspec.core.url_to_fs(address)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"{address} needs a package that reads {protocol}:// ({error}): pip install 'shardwise[s3]' for s3://, "
                "'shardwise[gcs]' for gs://"
            ) from None

    def create(self, path: RemotePath) -> NewFile:
        with _as_os_errors(path):
            return _Upload(path, self._files.open(self._key(path), "wb", block_size=_PART_BYTES))

    def open(self, path: RemotePath) -> tuple[IO[bytes], int]:
        with _as_os_errors(path):
            size = int(self._files.info(self._key(path))["size"])
            opened = self._files.open(
                self._key(path), "rb", block_size=_READ_AHEAD_BYTES, cache_type="readahead", size=size
            )
            return opened, size

    def read(self, paths: Sequence[RemotePath]) -> list[bytes]:
        keys = [self._key(path) for path in paths]
        with _as_os_errors(paths[0]):
            found = self._files.cat(keys)  # many at a time, where the store can
            return [found[key] for key in keys]

    def put(self, path: RemotePath, data: bytes) -> None:
        with _as_os_errors(path):
            self._files.pipe_file(self._key(path), data)

    def delete(self, paths: Sequence[RemotePath]) -> None:
        if paths:
            with _as_os_errors(paths[0]):
                self._files.rm([self._key(path) for path in paths])

    def sizes(self, folder: RemotePath) -> dict[str, int]:
        return {_name(entry): int(entry["size"]) for entry in self._list(folder) if entry["type"] == "file"}

    def folders(self, root: RemotePath) -> list[RemotePath]:
        return [root / _name(entry) for entry in self._list(root) if entry["type"] == "directory"]

    def begin(self, root: RemotePath, draft: str, target: RemotePath) -> RemotePath:
        self.put(root / draft, target.name.encode())
        return target

    def publish(self, root: RemotePath, draft: str, target: RemotePath, manifest: bytes) -> None:
        self.put(target / MANIFEST, manifest)
        self.delete([root / draft])

    def drafts(self, root: RemotePath) -> dict[str, float]:
        listed = {name: entry for entry in self._list(root) if (name := _name(entry)).startswith(DRAFT)}
        return {name: _written(entry) for name, entry in listed.items() if entry["type"] == "file"}

    def drop(self, root: RemotePath, draft: str) -> None:
        with contextlib.suppress(OSError):
            [name] = self.read([root / draft])
            target = root / name.decode()
            if draft.startswith(REMOVED) or MANIFEST not in self.sizes(target):
                self._clear(target)
            self.delete([root / draft])

    def unfinished(self, root: RemotePath) -> set[str]:
        names = set()
        for draft in self.drafts(root):
            with contextlib.suppress(FileNotFoundError):  # it has become a checkpoint meanwhile
                names.add(self.read([root / draft])[0].decode())
        return names

    def remove(self, path: RemotePath, draft: str) -> None:
        self.put(path.parent / draft, path.name.encode())
        self._clear(path)
        self.delete([path.parent / draft])

    def _clear(self, folder: RemotePath) -> None:
        names = self.sizes(folder)
        self.delete([folder / MANIFEST] if MANIFEST in names else [])
        self.delete([folder / name for name in names if name != MANIFEST])

    def _list(self, folder: RemotePath) -> list[dict[str, Any]]:
        with _as_os_errors(folder):
            self._files.invalidate_cache()  # other ranks write here
            try:
                entries = self._files.ls(self._key(folder), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
        own = self._key(folder).strip("/")
        return sorted((entry for entry in entries if str(entry["name"]).strip("/") != own), key=_name)

    def _key(self, path: RemotePath) -> str:
        return str(self._files._strip_protocol(str(path)))


class _Upload:
    """An object that is being uploaded. It appears when the upload ends."""

    def __init__(self, path: RemotePath, file: Any) -> None:
        self._path = path
        self._file = file

    def write(self, data: memoryview) -> int:
        with _as_os_errors(self._path):
            self._file.write(data)
            return len(data)

    def finish(self) -> None:
        with _as_os_errors(self._path):
            self._file.close()

    def abandon(self) -> None:
        # Without its last part: what was sent is not an object, and the draft has no manifest.
        self._file.closed = True
        with contextlib.suppress(Exception):
            self._file.discard()


@contextlib.contextmanager
def _as_os_errors(path: RemotePath) -> Iterator[None]:
    """Within it, whatever a client library raises becomes an OSError that names the object."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
    except Exception as error:
        raise OSError(None, f"{type(error).__name__}: {error}", str(path)) from error


def _name(entry: dict[str, Any]) -> str:
    return posixpath.basename(str(entry["name"]).rstrip("/"))


def _written(entry: dict[str, Any]) -> float:
    """When an object was written, as far as the store says."""
    when = next((entry[key] for key in ("LastModified", "mtime", "created", "updated") if key in entry), None)
    if isinstance(when, str):
        when = datetime.fromisoformat(when)
    return when.timestamp() if isinstance(when, datetime) else float(when or 0.0)


def storage_of(path: Location) -> Storage:
    """The medium that a location is on."""
    return ObjectStore(str(path)) if isinstance(path, RemotePath) else _FILE_SYSTEM


def locate(path: str | Location) -> Location:
    """Where a path or an address such as `s3://bucket/folder` leads."""
    if not isinstance(path, str) or "://" not in path:
        return path if isinstance(path, RemotePath) else Path(path)
    protocol, _, place = path.partition("://")
    # A folder by its address is a folder: fsspec would show files before they are complete, and sync none.
    return Path(place) if protocol in _LOCAL else RemotePath(path)
