"""Ranks on one machine read each other's memory, instead of sending it through sockets.

Over Gloo on the CPU, what one rank has for another is copied into a socket and out of it again, a few pages at a time,
by processes that have better things to do. Linux lets a process read the memory of another that it may debug: one copy,
made by whoever needs the values (benchmarks/gloo_ways.py). The messages remain, each with its tag, but all they say is
where values lie; and an answer, that they were read and may change. So a rank that is gone, late or elsewhere in its
program is noticed as before. Where ranks cannot read each other, everything goes through the sockets.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import queue
import secrets
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import Store

LEAST_BYTES = 1 << 21
"""Less is sent as it is: answers and a thread's turns cost as much (benchmarks/gloo_ways.py, with less to exchange)."""

_TOKEN_BYTES = 16
_END_S = 5.0


class _Run(ctypes.Structure):
    """C's struct iovec."""

    _fields_ = (("start", ctypes.c_void_p), ("size", ctypes.c_size_t))


class Neighbours:
    """The processes of all ranks, which this one can read."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = list(pids)
        self._read = ctypes.CDLL(None, use_errno=True).process_vm_readv
        runs = (ctypes.POINTER(_Run), ctypes.c_ulong)
        self._read.argtypes = (ctypes.c_int, *runs, *runs, ctypes.c_ulong)
        self._read.restype = ctypes.c_ssize_t

    @classmethod
    def meet(cls, store: Store, rank: int, world_size: int) -> Neighbours | None:
        """Find out whether every rank can read every other; if so on all of them, else on none. A collective.

        The same number may be another process on another machine: what counts is to find what that rank has hidden.
        """
        secret = ctypes.create_string_buffer(secrets.token_bytes(_TOKEN_BYTES), _TOKEN_BYTES)
        hint = {"pid": os.getpid(), "place": ctypes.addressof(secret), "token": secret.raw.hex()}
        store.set(f"neighbour/{rank}", json.dumps(hint))
        hints = [json.loads(store.get(f"neighbour/{other}")) for other in range(world_size)]
        met: Neighbours | None = None
        try:
            met = cls([hint["pid"] for hint in hints])
            finds_all = all(met._finds(other, hint) for other, hint in enumerate(hints))
        except (OSError, AttributeError, TypeError):  # forbidden, or not on this system
            finds_all = False
        store.set(f"neighbour/{rank}/finds_all", "yes" if finds_all else "no")
        answers = [store.get(f"neighbour/{other}/finds_all") for other in range(world_size)]
        del secret  # until here the others may look for it
        return met if all(answer == b"yes" for answer in answers) else None

    def _finds(self, rank: int, hint: dict[str, Any]) -> bool:
        found = torch.empty(_TOKEN_BYTES, dtype=torch.uint8, device="cpu")
        self.read(rank, hint["place"], found)
        return bool(bytes(found.tolist()).hex() == hint["token"])

    def read(self, rank: int, place: int, target: torch.Tensor) -> None:
        """Copy from an address in a rank's memory."""
        done, size, start = 0, target.numel() * target.element_size(), target.data_ptr()
        while done < size:
            here, there = _Run(start + done, size - done), _Run(place + done, size - done)
            count = self._read(self._pids[rank], ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
            if count <= 0:
                error = ctypes.get_errno()
                raise OSError(error, f"the memory of rank {rank} cannot be read: {os.strerror(error)}")
            done += count


class Loan(NamedTuple):
    """A tensor that a rank may read, or that we read from a rank into; over `group` it is told where, and answered."""

    rank: int
    tensor: torch.Tensor
    group: Any


def lend(rank: int, tensor: torch.Tensor, group: Any) -> Loan:
    """Values for a rank to read. They must stay as they are until it has."""
    return Loan(rank, tensor, group)


class Swap:
    """What ranks lend each other in one operation; a handle as those of `comm` are."""

    def __init__(self, lent: Sequence[Loan], borrowed: Sequence[Loan], tag: int) -> None:
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
        self.lent, self.borrowed, self._error = (), (), error
        self._is_done.set()


class Reader:
    """Has the swaps of one stream of operations carried out, one after the other, by a thread that lives as long.

    It must not be the thread that computes: ranks that wait in one stream would wait for those that wait in the other.
    And the one that computes does nothing here but ask and wait: each call would have both contend for the interpreter.
    """

    def __init__(self, neighbours: Neighbours, world_size: int) -> None:
        self._due: queue.SimpleQueue[Swap | None] = queue.SimpleQueue()
        self._is_closed = False
        work = _Hand(neighbours, world_size).work
        self._thread = threading.Thread(target=work, args=(self._due,), name="shardwise reader", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._due.put, None).atexit = False
        # A thread that comes back from Gloo while the interpreter ends would abort the process.
        self._on_exit = atexit.register(partial(_close, weakref.ref(self)))

    def swap(self, lent: Sequence[Loan], borrowed: Sequence[Loan], tag: int) -> Swap:
        """Let the others read, and read what they have for us, in this order."""
        if self._is_closed:
            raise RuntimeError("the engine was destroyed: make another with shardwise.initialize")
        swap = Swap(lent, borrowed, tag)
        self._due.put(swap)
        return swap

    def close(self) -> None:
        """End the thread once it is through, unless it waits for what will never come."""
        self._is_closed = True
        atexit.unregister(self._on_exit)
        self._due.put(None)
        self._thread.join(_END_S)


def _close(reference: weakref.ref[Reader]) -> None:
    reader = reference()
    if reader is not None:
        reader.close()


class _Hand:
    """Carries out swaps, one at a time."""

    def __init__(self, neighbours: Neighbours, world_size: int) -> None:
        self._neighbours = neighbours
        slips = torch.empty(2 * world_size, dtype=torch.int64, device="cpu").split(1)
        self._places, self._found = slips[:world_size], slips[world_size:]
        # An answer says nothing but that it came: all can be heard in one place.
        self._answer, self._heard = torch.zeros(2, dtype=torch.uint8, device="cpu").split(1)

    def work(self, due: queue.SimpleQueue[Swap | None]) -> None:
        while (swap := due.get()) is not None:
            try:
                self._carry_out(swap.lent, swap.borrowed, swap.tag)
            except Exception as error:  # whatever it is, the one who waits shall know
                swap.end(error)
            else:
                swap.end()
            del swap

    def _carry_out(self, lent: Sequence[Loan], borrowed: Sequence[Loan], tag: int) -> None:
        arrivals = [loan.group.recv([self._found[loan.rank]], loan.rank, tag) for loan in borrowed]
        works = [loan.group.recv([self._heard], loan.rank, tag) for loan in lent]
        for loan in lent:
            place = self._places[loan.rank].fill_(loan.tensor.data_ptr())
            works.append(loan.group.send([place], loan.rank, tag))
        for loan, arrival in zip(borrowed, arrivals, strict=True):
            arrival.wait()
            self._neighbours.read(loan.rank, int(self._found[loan.rank]), loan.tensor)
            works.append(loan.group.send([self._answer], loan.rank, tag))
        for work in works:
            work.wait()
