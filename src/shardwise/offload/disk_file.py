"""A rank's file on the disk: direct I/O by several threads, with checksums that are verified on each read.

Names, used throughout:
- *extent*: a contiguous part of the file that is written and read as a whole, on 4096-byte boundaries. Requests to one
  extent run in the order in which they were issued; requests to different extents run in any order.
- *block*: what one system call transfers, and what one checksum covers. Checksums are kept in memory.

The file holds nothing that must survive its process: it is never synced, and a checkpoint does not refer to it. It has
no name, so the kernel frees its space when its process ends, in whatever way, and no file of a user is ever removed.
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
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

from shardwise.config.sections import Offload
from shardwise.errors import ConfigError, DiskError
from shardwise.partition.layout import Span
from shardwise.sizes import format_bytes

ALIGN_BYTES = 4096
_MOST_BLOCK_BYTES = 64 << 20
_LEAST_THREADS = 8
_LOG = logging.getLogger("shardwise")


class Extent:
    """A part of the file. `checksums` has one for each block, and is None until a write is issued; `last` is the last
    request that was issued."""

    __slots__ = ("checksums", "last", "offset", "size_bytes")

    def __init__(self, offset: int, size_bytes: int) -> None:
        self.offset = offset
        self.size_bytes = size_bytes
        self.checksums: list[int] | None = None
        self.last: Future[None] | None = None


class DiskFile:
    """One file of this process in `folder`, without a name; it ends with `close`, and with the process."""

    def __init__(self, folder: Path, settings: Offload) -> None:
        _check_folder(folder)
        block = min(settings.aio.block_bytes, _MOST_BLOCK_BYTES)
        self.block_bytes = aligned(block)
        self.folder = folder
        self.handle = _create(folder)
        self._close = weakref.finalize(self, os.close, self.handle)
        self.is_direct = _make_direct(self.handle, folder)
        self._end = self._reserved_bytes = 0
        self._failure: BaseException | None = None
        # A thread has one system call in flight, where a library for asynchronous I/O queues many: a configuration
        # that names few threads for such a library still gets enough of them.
        threads = min(settings.aio.queue_depth, max(settings.aio.threads, _LEAST_THREADS))
        self._workers = ThreadPoolExecutor(threads, "shardwise-disk")
        # Waits for copies from the device. They end in the order in which they were issued, so one thread is enough.
        self._copy_waiter = ThreadPoolExecutor(1, "shardwise-disk-copies")
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        """The reserved size of the file."""
        return self._reserved_bytes

    def room(self) -> tuple[int, int]:
        """The number of the file system, and the bytes that are free there."""
        return os.fstat(self.handle).st_dev, _free_bytes(self.handle)

    def reserve(self, size_bytes: int) -> None:
        """Reserve disk space for a file of `size_bytes`. A `DiskError` says how much is needed and how much is free."""
        if size_bytes <= self._reserved_bytes:
            return
        more = size_bytes - self._reserved_bytes
        try:
            if _free_bytes(self.handle) < more:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(self.handle, self._reserved_bytes, more)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):  # the file system cannot reserve space
                os.ftruncate(self.handle, size_bytes)
            else:
                free = format_bytes(_free_bytes(self.handle))
                raise DiskError(
                    error.errno,
                    f"{self.folder} has too little free space: this rank needs {format_bytes(size_bytes)}, of "
                    f"which it has {format_bytes(self._reserved_bytes)}, and {free} are free for all ranks of this "
                    f"machine ({error.strerror}); free some, or set offload.nvme_path to a folder on another disk",
                ) from error
        self._reserved_bytes = size_bytes

    def allocate(self, size_bytes: int) -> Extent:
        """A new extent of `size_bytes`, rounded up to whole pages."""
        extent = Extent(self._end, aligned(size_bytes))
        self.reserve(self._end + extent.size_bytes)
        self._end += extent.size_bytes
        return extent

    def read(self, extent: Extent, target: memoryview) -> Future[None]:
        """Read a written extent. The future raises a `DiskError` if its bytes are not those that were written."""
        assert extent.checksums is not None, "nothing was written here"
        return self._queue(extent, lambda: self._read(extent, target))

    def write(self, extent: Extent, source: memoryview, ready: Callable[[], None] | None = None) -> Future[None]:
        """Write an extent once `ready` has returned. `source` must not change until the future is done."""
        extent.checksums = extent.checksums or []
        done = self._queue(extent, lambda: self._write(extent, source), ready)
        done.add_done_callback(self._note_failure)
        return done

    def check(self) -> None:
        """Raise the first error that a write met, if any did."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Finish pending requests, and close the file, which frees its space."""
        self._copy_waiter.shutdown()
        self._workers.shutdown()
        self._close()

    def _queue(self, extent: Extent, work: Callable[[], None], ready: Callable[[], None] | None = None) -> Future[None]:
        """Run `work` in a worker, after `ready` and after the request that was issued to `extent` before.

        Without that order a read could overtake the write before it and return old values:
        test_disk.test_what_is_asked_of_an_extent_happens_in_order.
        """
        done: Future[None] = Future()
        previous, extent.last = extent.last, done

        def start(_: object = None) -> None:
            _pass_failure(done, lambda: self._workers.submit(_complete, done, work))

        def start_after_previous() -> None:
            if ready is not None:
                ready()
            if previous is None:
                start()
            else:
                previous.add_done_callback(start)

        if ready is None:
            start_after_previous()
        else:
            _pass_failure(done, lambda: self._copy_waiter.submit(_pass_failure, done, start_after_previous))
        return done

    def _read(self, extent: Extent, target: memoryview) -> None:
        assert extent.checksums is not None
        for number, part in enumerate(self._blocks(extent)):
            block, where = target[part.slice], extent.offset + part.start
            self._transfer(os.preadv, block, where, "read")
            if extent.checksums[number : number + 1] != [zlib.crc32(block)]:
                raise DiskError(
                    errno.EIO,
                    f"the file in {self.folder}: the {part.numel} bytes at {where} are not those that were written "
                    "there (torn or altered); training cannot continue from them: load the last checkpoint, and check "
                    "the disk",
                )

    def _write(self, extent: Extent, source: memoryview) -> None:
        blocks = list(self._blocks(extent))
        # Set before the bytes are written: if the write fails, blocks that still hold the old bytes do not match, and a
        # later read raises instead of returning the values of the step before
        # (test_disk.test_a_write_that_breaks_off_is_noticed).
        extent.checksums = [zlib.crc32(source[block.slice]) for block in blocks]
        for block in blocks:
            self._transfer(os.pwritev, source[block.slice], extent.offset + block.start, "written")

    def _transfer(self, call: Callable[..., int], block: memoryview, offset: int, what: str) -> None:
        done = 0
        while done < len(block):
            try:
                count = call(self.handle, [block[done:]], offset + done)
            except OSError as error:
                raise DiskError(
                    error.errno,
                    f"the file in {self.folder}: {len(block)} bytes at {offset} could not be {what} "
                    f"({error.strerror}); this run cannot continue: free space or check the disk, restart, and "
                    "load the last checkpoint",
                ) from error
            if not count:
                raise DiskError(
                    errno.EIO,
                    f"the file in {self.folder}: of {len(block)} bytes at {offset} only {done} could be {what}: the "
                    "file was cut short; training cannot continue from it: load the last checkpoint, and check the "
                    "disk",
                )
            done += count

    def _blocks(self, extent: Extent) -> Iterator[Span]:
        return Span(0, extent.size_bytes).split(self.block_bytes)

    def _note_failure(self, done: Future[None]) -> None:
        with self._lock:
            self._failure = self._failure or done.exception()


class DiskDemand(NamedTuple):
    """What one rank needs on one disk, and what is free there before any rank has reserved anything.

    `disk` is the host's name and the number of the file system.
    """

    disk: tuple[str, int]
    folder: str
    needed_bytes: int
    free_bytes: int


def shortage(demands: Sequence[Sequence[DiskDemand]], rank: int) -> str | None:
    """Why the files of `rank` have no room, from the demands of every rank; None if they have.

    Each rank alone would count the same free space as its own.

    >>> each = [DiskDemand(("here", 1), "/nvme", 6000, 8000)]
    >>> shortage([each], 0)
    >>> "the 2 ranks that use this disk need 12kB together, and 8kB are free" in shortage([each, each], 1)
    True
    """
    users: defaultdict[tuple[str, int], list[tuple[int, DiskDemand]]] = defaultdict(list)
    for number, own in enumerate(demands):
        for demand in own:
            users[demand.disk].append((number, demand))
    for uses in users.values():
        mine = [demand for number, demand in uses if number == rank]
        total, free = sum(demand.needed_bytes for _, demand in uses), min(demand.free_bytes for _, demand in uses)
        if mine and total > free:
            count = len({number for number, _ in uses})
            together = f", the {count} ranks that use this disk need {format_bytes(total)} together" * (count > 1)
            return (
                f"{mine[0].folder} has too little free space: this rank needs "
                f"{format_bytes(sum(demand.needed_bytes for demand in mine))}{together}, and {format_bytes(free)} are "
                "free; free some, or set offload.nvme_path to a folder on another disk"
            )
    return None


def aligned(size_bytes: int) -> int:
    """`size_bytes` rounded up to whole pages, the granularity of direct I/O.

    >>> aligned(1), aligned(8192)
    (4096, 8192)
    """
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(
            f"offload.nvme_path is {str(folder)!r}: there is no such folder; create it on the disk to use"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"offload.nvme_path is {str(folder)!r}: files cannot be created in this folder")


def _create(folder: Path) -> int:
    """A new file without a name."""
    try:
        with contextlib.suppress(AttributeError, OSError):  # the system or the file system has no such files
            return os.open(folder, os.O_RDWR | os.O_TMPFILE, 0o600)
        path = folder / f".shardwise-{os.getpid()}-{os.urandom(8).hex()}"
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        path.unlink()
    except OSError as error:
        raise DiskError(
            error.errno,
            f"no file can be created in {folder} ({error.strerror}): set offload.nvme_path to a folder on a local disk "
            "that can be written",
        ) from error
    return handle


def _make_direct(handle: int, folder: Path) -> bool:
    """Bypass the page cache, if the file system can. Some refuse the flag, others the first request."""
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    with contextlib.closing(mmap.mmap(-1, ALIGN_BYTES)) as page:
        try:
            fcntl.fcntl(handle, fcntl.F_SETFL, flags | getattr(os, "O_DIRECT", 0))
            os.pwritev(handle, [page], 0)
            os.preadv(handle, [page], 0)
        except OSError as error:
            if error.errno == errno.ENOSPC:  # `reserve` reports it, with what is needed
                return True
            fcntl.fcntl(handle, fcntl.F_SETFL, flags)
            _warn_of_page_cache(folder)
            return False
    return True


@cache
def _warn_of_page_cache(folder: Path) -> None:
    """Once for each folder."""
    _LOG.warning(
        "%s: this file system does not support direct I/O (O_DIRECT), so the page cache is used, which takes host "
        "memory and is slower than the disk; set offload.nvme_path to a folder on a local disk",
        folder,
    )


def _free_bytes(handle: int) -> int:
    found = os.fstatvfs(handle)
    return found.f_bavail * found.f_frsize


def _complete(done: Future[None], work: Callable[[], object]) -> None:
    """Run `work`, and complete `done` with its outcome."""
    _pass_failure(done, work)
    if not done.done():
        done.set_result(None)


def _pass_failure(done: Future[None], work: Callable[[], object]) -> None:
    """Run `work`. If it raises, `done` fails with its exception, because no caller is left to catch it."""
    try:
        work()
    except BaseException as error:
        done.set_exception(error)
