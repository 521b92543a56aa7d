"""What ranks on one machine have for each other, read by whoever needs it instead of sent through sockets.

Over Gloo on the CPU, what one rank has for another is copied into a socket and out of it again, a few pages at a time,
by processes that have better things to do, and each message wakes a thread of Gloo's besides. Here a message, with the
operation's tag, says where values lie; and an answer, that they were read and may change (benchmarks/gloo_ways.py). So
a rank that is gone, late or elsewhere in its program is noticed as before. Where ranks cannot read each other (see
`neighbours`), everything goes through Gloo.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import socket
import struct
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed import distributed_c10d as c10d

from shardwise.neighbours import Neighbours, Run

LEAST_BYTES = 1 << 21
"""Less is sent as it is: answers and a thread's turns cost as much (benchmarks/gloo_ways.py, with less to exchange)."""

MOST_CHUNKS = 1024
"""Values in more chunks than this are brought together first, and lent as one."""

_END_S = 1.5
"""How long the end waits for what is under way. The others believe a silent rank lost after `agreement`'s ANSWER_S."""
_HEAD, _RUN = struct.Struct("=?i"), struct.Struct("=qq")
_MESSAGE_BYTES = _HEAD.size + MOST_CHUNKS * _RUN.size


class Chunk(NamedTuple):
    """A part of what is lent: contiguous values, or so many zeros in bytes."""

    values: torch.Tensor | None
    size: int

    @classmethod
    def of(cls, values: torch.Tensor) -> Chunk:
        return cls(values, values.nbytes)

    @property
    def run(self) -> Run:
        return Run(self.values.data_ptr() if self.values is not None else 0, self.size)


class Loan(NamedTuple):
    """Values for a rank to read, one after the other. They must stay as they are until it has."""

    rank: int
    chunks: Sequence[Chunk]


def lend(rank: int, chunks: Sequence[Chunk], dtype: torch.dtype, group: Any) -> Loan:
    """What every loan comes from: whoever counts what ranks of a group send looks here."""
    return Loan(rank, chunks)


class Swap:
    """What ranks lend each other in one operation; a handle as those of `comm` are."""

    def __init__(self, lent: Sequence[Loan], borrowed: Mapping[int, torch.Tensor], tag: int) -> None:
        self.lent, self.borrowed, self.tag = lent, borrowed, tag
        self._is_done = threading.Event()
        self._error: Exception | None = None

    def wait(self) -> None:
        """As Gloo's works do, it holds back Ctrl-C and its like: whoever catches them must not find values that others
        still read."""
        interruption: BaseException | None = None
        while not self._is_done.is_set():
            try:
                self._is_done.wait()
            except BaseException as error:
                interruption = error
        if interruption is not None:
            raise interruption
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error

    def end(self, error: Exception | None = None) -> None:
        """It is carried out, or given up."""
        self.lent, self.borrowed, self._error = (), {}, error
        self._is_done.set()


class Reader:
    """Has the swaps of one stream of operations carried out, one after the other, by a thread that lives as long.

    It must not be the thread that computes: ranks that wait in one stream would wait for those that wait in the other.
    And the one that computes does nothing here but ask and wait: each call would have both contend for the interpreter.
    """

    def __init__(self, neighbours: Neighbours, stream: str) -> None:
        self._due: queue.SimpleQueue[Swap | None] = queue.SimpleQueue()
        self._is_closed = False
        self._lines = neighbours.lines[stream]
        work = _Hand(neighbours, self._lines).work
        self._thread = threading.Thread(target=work, args=(self._due,), name="shardwise reader", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._due.put, None).atexit = False
        # A thread that comes back from a call while the interpreter ends would abort the process.
        self._on_exit = atexit.register(partial(_close, weakref.ref(self)))

    def swap(self, lent: Sequence[Loan], borrowed: Mapping[int, torch.Tensor], tag: int) -> Swap:
        """Let the others read, and read what they have for us, in this order."""
        if self._is_closed:
            raise RuntimeError("the engine was destroyed: make another with shardwise.initialize")
        swap = Swap(lent, borrowed, tag)
        self._due.put(swap)
        return swap

    def wake(self) -> None:
        """Break off whatever is waited for, here and on the other ranks."""
        for line in self._lines.values():
            with contextlib.suppress(OSError):  # closed already
                line.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the thread once it is through; if it waits for what does not come, without that."""
        self._is_closed = True
        atexit.unregister(self._on_exit)
        self._due.put(None)
        self._thread.join(_END_S)
        if self._thread.is_alive():
            self.wake()
            self._thread.join(_END_S)


def _close(reference: weakref.ref[Reader]) -> None:
    reader = reference()
    if reader is not None:
        reader.close()


class _Hand:
    """Carries out swaps, one at a time."""

    def __init__(self, neighbours: Neighbours, lines: Mapping[int, socket.socket]) -> None:
        self._neighbours = neighbours
        self._lines = lines
        self._heard: dict[tuple[int, bytes], bytes] = {}
        patience_s = int(c10d.default_pg_timeout.total_seconds())
        for line in lines.values():
            # As an option of the system's: with one of Python's, which a program may set for all, each call is two.
            line.settimeout(None)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", patience_s, 0))

    def work(self, due: queue.SimpleQueue[Swap | None]) -> None:
        while (swap := due.get()) is not None:
            try:
                self._carry_out(swap.lent, swap.borrowed, swap.tag)
            except Exception as error:  # whatever it is, the one who waits shall know
                swap.end(error)
            else:
                swap.end()
            del swap
        for line in self._lines.values():
            with contextlib.suppress(OSError):  # nobody is there any more
                line.shutdown(socket.SHUT_RDWR)  # also where a child of this process holds it
            line.close()

    def _carry_out(self, lent: Sequence[Loan], borrowed: Mapping[int, torch.Tensor], tag: int) -> None:
        offer, answer = _HEAD.pack(True, tag), _HEAD.pack(False, tag)
        for rank, chunks in lent:
            self._lines[rank].send(offer + b"".join([_RUN.pack(*chunk.run) for chunk in chunks]))
        for rank, target in borrowed.items():
            runs = [Run(*run) for run in _RUN.iter_unpack(self._hear(rank, offer))]
            self._neighbours.read(rank, runs, target)
            self._lines[rank].send(answer)
        for rank, _ in lent:
            self._hear(rank, answer)

    def _hear(self, rank: int, head: bytes) -> bytes:
        """What a rank says under this head; what it says else is kept for later."""
        while (rank, head) not in self._heard:
            try:
                message = self._lines[rank].recv(_MESSAGE_BYTES)
            except BlockingIOError:
                raise TimeoutError(f"rank {rank} has not answered in {c10d.default_pg_timeout}") from None
            if not message:
                raise ConnectionError(f"rank {rank} has closed its connection")
            self._heard[rank, message[: _HEAD.size]] = message[_HEAD.size :]
        return self._heard.pop((rank, head))
