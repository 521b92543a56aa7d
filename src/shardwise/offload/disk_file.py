"""A rank's file on the disk: direct I/O by several threads, checksums that are verified on each read, and its removal.

Names, used throughout:
- *extent*: a run of the file that is written and read as a whole, on 4096-byte boundaries. What is asked of an extent
  happens in the order in which it was asked.
- *block*: what one request carries, and what one checksum is of. Checksums are kept in memory.

The file is ours for as long as we hold its lock: what a process that died left behind is known by a lock that nobody
holds, and is removed by the next one that starts in that folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

from shardwise.config.sections import Offload
from shardwise.errors import ConfigError, DiskError
from shardwise.sizes import format_bytes

ALIGN_BYTES = 4096
SUFFIX = ".shardwise"
_MOST_BLOCK_BYTES = 64 << 20
_LEAST_THREADS = 8
_LOG = logging.getLogger("shardwise")


class Extent:
    """A run of the file. `checksums` are of its blocks; None while nothing was written there."""

    __slots__ = ("checksums", "last", "offset", "size_bytes")

    def __init__(self, offset: int, size_bytes: int) -> None:
        self.offset = offset
        self.size_bytes = size_bytes
        self.checksums: list[int] | None = None
        self.last: Future[None] | None = None


class DiskFile:
    """One file of this process below `folder`, removed when it is closed, and at exit."""

    def __init__(self, folder: Path, name: str, settings: Offload) -> None:
        _check_folder(folder)
        remove_leftovers(folder)
        block = min(settings.aio.block_bytes, _MOST_BLOCK_BYTES)
        self.block_bytes = aligned(block)
        self._handle, self.path = _create(folder, name)
        self._remove = weakref.finalize(self, _remove, self._handle, self.path, os.getpid())
        self.is_direct = _make_direct(self._handle, self.path)
        self._end = self._reserved_bytes = 0
        self._failure: BaseException | None = None
        # Each thread has one request in flight; libraries for asynchronous I/O queue many in one thread.
        threads = min(settings.aio.queue_depth, max(settings.aio.threads, _LEAST_THREADS))
        self._workers = ThreadPoolExecutor(threads, "shardwise-disk")
        self._starter = ThreadPoolExecutor(1, "shardwise-disk-starter")
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        """What the file takes."""
        return self._reserved_bytes

    def reserve(self, size_bytes: int) -> None:
        """Have the disk set so much aside; a `DiskError` says what is needed and what is free."""
        if size_bytes <= self._reserved_bytes:
            return
        more = size_bytes - self._reserved_bytes
        try:
            if _free_bytes(self._handle) < more:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(self._handle, self._reserved_bytes, more)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that cannot set room aside
                os.ftruncate(self._handle, size_bytes)
            else:
                free = format_bytes(_free_bytes(self._handle))
                raise DiskError(
                    error.errno,
                    f"{self.path.parent} has no room for what shall rest there: this rank needs "
                    f"{format_bytes(size_bytes)}, of which it has {format_bytes(self._reserved_bytes)}, and {free} are "
                    f"free ({error.strerror}); free some, or name a folder on another disk as offload.nvme_path",
                ) from error
        self._reserved_bytes = size_bytes

    def allocate(self, size_bytes: int) -> Extent:
        """Room for `size_bytes`, rounded up to whole pages."""
        extent = Extent(self._end, aligned(size_bytes))
        self.reserve(self._end + extent.size_bytes)
        self._end += extent.size_bytes
        return extent

    def read(self, extent: Extent, target: memoryview) -> Future[None]:
        """Read an extent that was written; the future raises a `DiskError` if it is not as it was."""
        assert extent.checksums is not None, "nothing was written here"
        return self._queue(extent, lambda: self._read(extent, target))

    def write(self, extent: Extent, source: memoryview, ready: Callable[[], None] | None = None) -> Future[None]:
        """Write an extent, once `ready` has returned. `source` is ours until the future is done."""
        extent.checksums = extent.checksums or []
        done = self._queue(extent, lambda: self._write(extent, source), ready)
        done.add_done_callback(self._note_failure)
        return done

    def check(self) -> None:
        """Raise what a write met with, if any did."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Finish what is under way, and remove the file."""
        self._starter.shutdown()
        self._workers.shutdown()
        self._remove()

    def _queue(self, extent: Extent, work: Callable[[], None], ready: Callable[[], None] | None = None) -> Future[None]:
        done: Future[None] = Future()
        previous, extent.last = extent.last, done

        def start(_: object = None) -> None:
            _settling(done, lambda: self._workers.submit(_settle, done, work))

        def begin() -> None:
            if ready is not None:
                ready()
            if previous is None:
                start()
            else:
                previous.add_done_callback(start)

        if ready is None:
            begin()
        else:
            # Copies end in the order in which they were issued, so one thread can wait for all of them.
            _settling(done, lambda: self._starter.submit(_settling, done, begin))
        return done

    def _read(self, extent: Extent, target: memoryview) -> None:
        assert extent.checksums is not None
        for number, (start, stop) in enumerate(self._blocks(extent)):
            block = target[start:stop]
            self._transfer(os.preadv, block, extent.offset + start, "read")
            if extent.checksums[number : number + 1] != [zlib.crc32(block)]:
                where = extent.offset + start
                raise DiskError(
                    errno.EIO,
                    f"{self.path}: the {stop - start} bytes at {where} are not those that were written there (torn or "
                    "altered); training cannot go on from them: load the last checkpoint, and check the disk",
                )

    def _write(self, extent: Extent, source: memoryview) -> None:
        blocks = list(self._blocks(extent))
        # Before the bytes: what a write that breaks off leaves behind must not pass for the old values or the new.
        extent.checksums = [zlib.crc32(source[start:stop]) for start, stop in blocks]
        for start, stop in blocks:
            self._transfer(os.pwritev, source[start:stop], extent.offset + start, "written")

    def _transfer(self, call: Callable[..., int], block: memoryview, offset: int, what: str) -> None:
        done = 0
        while done < len(block):
            try:
                count = call(self._handle, [block[done:]], offset + done)
            except OSError as error:
                raise DiskError(
                    error.errno,
                    f"{self.path}: {len(block)} bytes at {offset} could not be {what} ({error.strerror}); this run "
                    "cannot go on: free the disk or check it, start again, and load the last checkpoint",
                ) from error
            if not count:
                raise DiskError(
                    errno.EIO,
                    f"{self.path}: of {len(block)} bytes at {offset} only {done} could be {what}: the file was cut "
                    "short; training cannot go on from it: load the last checkpoint, and check the disk",
                )
            done += count

    def _blocks(self, extent: Extent) -> Iterator[tuple[int, int]]:
        for start in range(0, extent.size_bytes, self.block_bytes):
            yield start, min(start + self.block_bytes, extent.size_bytes)

    def _note_failure(self, done: Future[None]) -> None:
        with self._lock:
            self._failure = self._failure or done.exception()


def aligned(size_bytes: int) -> int:
    """Rounded up to whole pages, in which direct I/O is done.

    >>> aligned(1), aligned(8192)
    (4096, 8192)
    """
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def remove_leftovers(folder: Path) -> None:
    """Remove the files of processes that died: nobody holds their locks."""
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError):  # alive, or another process was quicker
            handle = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(handle)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(
            f"offload.nvme_path is {str(folder)!r}: there is no such folder; make it on the disk that shall be used"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"offload.nvme_path is {str(folder)!r}: no file can be made in this folder")


def _create(folder: Path, name: str) -> tuple[int, Path]:
    """A new file under our lock. One that starts beside us may take it for a leftover before it is locked."""
    path = folder / f"{name}-{os.getpid()}-{os.urandom(4).hex()}{SUFFIX}"
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise DiskError(error.errno, f"{path} cannot be made ({error.strerror})") from error
        with contextlib.suppress(OSError):  # without locks there, nobody will take it for a leftover either
            fcntl.flock(handle, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(handle)):
                return handle, path
        os.close(handle)


def _make_direct(handle: int, path: Path) -> bool:
    """Go past the page cache, where the file system lets us: some refuse at once, others with the first request."""
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    with contextlib.closing(mmap.mmap(-1, ALIGN_BYTES)) as page:
        try:
            fcntl.fcntl(handle, fcntl.F_SETFL, flags | getattr(os, "O_DIRECT", 0))
            os.pwritev(handle, [page], 0)
            os.preadv(handle, [page], 0)
        except OSError as error:
            if error.errno == errno.ENOSPC:  # `reserve` will say so
                return True
            fcntl.fcntl(handle, fcntl.F_SETFL, flags)
            _warn_of_page_cache(path.parent)
            return False
    return True


@cache
def _warn_of_page_cache(folder: Path) -> None:
    """Once for each folder."""
    _LOG.warning(
        "%s: this file system cannot be read and written directly (O_DIRECT), so the page cache is used, which takes "
        "host memory and is slower than a disk can be; name a folder on a disk as offload.nvme_path",
        folder,
    )


def _free_bytes(handle: int) -> int:
    found = os.fstatvfs(handle)
    return found.f_bavail * found.f_frsize


def _remove(handle: int, path: Path, owner: int) -> None:
    if os.getpid() == owner:  # and not a process that was forked off
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    os.close(handle)


def _settle(done: Future[None], work: Callable[[], object]) -> None:
    _settling(done, work)
    if not done.done():
        done.set_result(None)


def _settling(done: Future[None], work: Callable[[], object]) -> None:
    """Do `work`; if it fails, `done` has."""
    try:
        work()
    except BaseException as error:
        done.set_exception(error)
