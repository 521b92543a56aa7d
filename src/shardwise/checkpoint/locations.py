"""From an address or a path to the storage that it is on."""

from __future__ import annotations

from pathlib import Path

from shardwise.checkpoint.object_store import ObjectStore
from shardwise.checkpoint.storage import FileSystem, Location, RemotePath, Storage

_FILE_SYSTEM = FileSystem()


def storage_of(path: Location) -> Storage:
    """The medium that a location is on."""
    return ObjectStore(str(path)) if isinstance(path, RemotePath) else _FILE_SYSTEM


def locate(path: str | Location) -> Location:
    """Where a path or an address such as `s3://bucket/folder` leads."""
    if isinstance(path, RemotePath):
        return path
    return RemotePath(path) if isinstance(path, str) and "://" in path else Path(path)
