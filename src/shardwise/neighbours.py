"""Ranks on one machine, which can read each other's memory.

Linux lets a process read the memory of another that it may debug: one copy, made by whoever needs the values. Who can
be read is found out once, by looking for what each rank has hidden; and the ranks that can are given *lines*, a socket
for each pair of them and each stream of operations, over which they say where values lie (see `swaps`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import re
import secrets
import socket
import struct
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import Store

_CANNOT = (OSError, AttributeError, TypeError)
"""What is forbidden, or not on this system, raises one of these."""
_CALL_S = 30.0
_TOKEN_BYTES = 16
_DOOR = "\0shardwise-{}"
_HELLO_BYTES = 256
_MOST_RUNS = 1024
"""How many the system takes in one call."""
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_STATUS = Path("/proc/self/status")
_NOBODY, _CAP_SYS_PTRACE = 3, 19
"""Yama's scope in which no process reads another, and the number of the capability that any other scope yields to."""


class Run(NamedTuple):
    """Bytes in a process' memory; zeros, where `start` is 0."""

    start: int
    size: int


class _Run(ctypes.Structure):
    """C's struct iovec."""

    _fields_ = (("start", ctypes.c_void_p), ("size", ctypes.c_size_t))


class Neighbours:
    """The processes of all ranks, which this one can read, and the lines to them: by stream and rank."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.lines: dict[str, dict[int, socket.socket]] = {}
        self._pids = list(pids)
        self._read = ctypes.CDLL(None, use_errno=True).process_vm_readv
        runs = (ctypes.POINTER(_Run), ctypes.c_ulong)
        self._read.argtypes = (ctypes.c_int, *runs, *runs, ctypes.c_ulong)
        self._read.restype = ctypes.c_ssize_t

    @classmethod
    def meet(cls, store: Store, rank: int, world_size: int, streams: Sequence[str]) -> Neighbours | None:
        """Find out whether every rank can read every other; if so on all of them, else on none. A collective.

        The same number may be another process on another machine: what counts is to find what that rank has hidden.
        """
        secret = ctypes.create_string_buffer(secrets.token_bytes(_TOKEN_BYTES), _TOKEN_BYTES)
        hint = {"pid": os.getpid(), "place": ctypes.addressof(secret), "token": secret.raw.hex()}
        with _Door(secret.raw.hex()) as door:
            store.set(f"neighbour/{rank}", json.dumps(hint))
            hints = [json.loads(store.get(f"neighbour/{other}")) for other in range(world_size)]
            found = cls._find(hints, rank, streams) if door.is_open else None
            store.set(f"neighbour/{rank}/finds_all", "no" if found is None else "yes")
            answers = [store.get(f"neighbour/{other}/finds_all") for other in range(world_size)]
            del secret  # until here the others may look for it
            if found is not None and all(answer == b"yes" for answer in answers):
                found._answer(door, (world_size - 1 - rank) * len(streams))
                return found
            if found is not None:
                found.close()
            return None

    @classmethod
    def _find(cls, hints: Sequence[dict[str, Any]], rank: int, streams: Sequence[str]) -> Neighbours | None:
        """All ranks, with lines to the lower ones."""
        found: Neighbours | None = None
        try:
            found = cls([hint["pid"] for hint in hints])
            if all(found._finds(other, hint) for other, hint in enumerate(hints)):
                found._call(rank, [hint["token"] for hint in hints[:rank]], streams)
                return found
        except _CANNOT:
            if found is not None:
                found.close()
        return None

    def _finds(self, rank: int, hint: dict[str, Any]) -> bool:
        found = torch.empty(_TOKEN_BYTES, dtype=torch.uint8, device="cpu")
        self.read(rank, [Run(hint["place"], _TOKEN_BYTES)], found)
        return bool(bytes(found.tolist()).hex() == hint["token"])

    def _call(self, rank: int, tokens: Sequence[str], streams: Sequence[str]) -> None:
        """Open a line to every lower rank, in each stream. It answers when all have called."""
        for stream in streams:
            for other, token in enumerate(tokens):
                line = self.lines.setdefault(stream, {})[other] = _socket()
                line.connect(_DOOR.format(token))
                line.send(json.dumps({"rank": rank, "stream": stream}).encode())

    def _answer(self, door: _Door, count: int) -> None:
        """Take the lines of the higher ranks, and of nobody else."""
        while count:
            line, pid = door.accept()
            if pid not in self._pids:
                line.close()
                continue
            hello = json.loads(line.recv(_HELLO_BYTES))
            self.lines.setdefault(hello["stream"], {})[hello["rank"]] = line
            count -= 1

    def close(self) -> None:
        """Hang up."""
        for lines in self.lines.values():
            for line in lines.values():
                line.close()

    def read(self, rank: int, runs: Sequence[Run], target: torch.Tensor) -> None:
        """Copy what lies there in a rank's memory, one after the other."""
        sizes, place = sum(run.size for run in runs), target.data_ptr()
        if sizes != target.nbytes:
            raise ValueError(f"rank {rank} has {sizes} bytes where {target.nbytes} are expected")
        for is_blank, alike in groupby(runs, lambda run: not run.start):
            for run in alike if is_blank else ():
                ctypes.memset(place, 0, run.size)
                place += run.size
            if not is_blank:
                place = self._copy(rank, list(alike), place)

    def _copy(self, rank: int, runs: list[Run], place: int) -> int:
        """Copy as much as the system does at a time, until everything is at `place`; where that ends."""
        while runs:
            some = runs[:_MOST_RUNS]
            here, there = _Run(place, sum(run.size for run in some)), (_Run * len(some))(*(_Run(*run) for run in some))
            count = self._read(self._pids[rank], ctypes.byref(here), 1, there, len(some), 0)
            if count <= 0:
                error = ctypes.get_errno()
                raise OSError(error, f"the memory of rank {rank} cannot be read: {os.strerror(error)}")
            place += count
            runs = list(_after(runs, count))
        return place


class _Door:
    """Where the higher ranks call; on a system without such sockets it stays closed."""

    def __init__(self, token: str) -> None:
        self.is_open = False
        self._stack = contextlib.ExitStack()
        with contextlib.suppress(*_CANNOT):
            self._socket = self._stack.enter_context(_socket())
            self._socket.bind(_DOOR.format(token))
            self._socket.listen(socket.SOMAXCONN)
            self.is_open = True

    def accept(self) -> tuple[socket.socket, int]:
        """The next line, and the process behind it."""
        line, _ = self._socket.accept()
        (pid,) = struct.unpack("i8x", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return line, pid

    def __enter__(self) -> _Door:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()


def _socket() -> socket.socket:
    """Nobody listens before all have called, and a call that finds no room must not wait for that."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(_CALL_S)
    return made


@functools.cache
def are_allowed() -> bool:
    """Whether processes may read each other on this machine, as far as one of them can tell by itself."""
    with contextlib.suppress(OSError):  # there is no Yama
        scope = int(_YAMA.read_text())
        if scope == _NOBODY or (scope and not _may_trace()):
            return False
    value = ctypes.create_string_buffer(1)
    try:
        Neighbours([os.getpid()]).read(0, [Run(ctypes.addressof(value), 1)], torch.ones(1, dtype=torch.uint8))
    except _CANNOT:
        return False
    return True


def _may_trace() -> bool:
    """Whether this process has CAP_SYS_PTRACE, which root in a container need not have."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", _STATUS.read_text(), re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> _CAP_SYS_PTRACE & 1)


def _after(runs: Sequence[Run], count: int) -> Iterator[Run]:
    """What is left of `runs` after so many bytes.

    >>> list(_after([Run(100, 10), Run(200, 10)], 14))
    [Run(start=204, size=6)]
    """
    for index, (start, size) in enumerate(runs):
        if count < size:
            yield Run(start + count, size - count)
            yield from islice(runs, index + 1, None)
            return
        count -= size
