"""Stops the ranks of all axes when one of them is lost: what `agreement` does for ZeRO's group, for the whole mesh.

Ranks of a tp or pp axis wait for each other in torch's own collectives and messages, which have no check: if a rank
dies, ranks of other ZeRO groups would wait up to the process group's timeout. Each engine on a mesh with such axes has
a watch of its own; the same engine's on all ranks share a place in the store. Its thread polls about once a second, and
finds

- the verdict that another rank has written: why the ranks cannot continue;
- a process of this host that has ended without saying so;
- a rank that has left after fewer steps than this one has begun.

An exception writes a verdict too, if it breaks off a pipeline's step or ends the process. Once there is one, every rank
breaks its groups of all axes, which ends all waits, and raises the verdict as a DisagreementError.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import torch.distributed as dist

from shardwise.agreement.sight import see_process
from shardwise.agreement.store_link import STORE_S, StoreLink, numbered_store
from shardwise.comm import groups as process_groups
from shardwise.errors import DisagreementError
from shardwise.machine.process import Condition, Identity, ending_error, start_thread

ANSWER_S = 4.0
"""How long a rank whose connections broke waits for a verdict that says why."""
_LOG = logging.getLogger("shardwise")
_READ_ERROR = "Read the error of that rank first, then restart all ranks from the last checkpoint."
_ADVICE = "All ranks of a mesh must run the same number of steps: look for a loop that ends early on one of them."


class WorldWatch:
    """An engine's watch over the ranks of all axes: a verdict breaks `groups` and calls `end(verdict)`.

    All ranks make theirs in the same order. The verdict of one stops every engine of the process.
    """

    _of_process: ClassVar[weakref.WeakSet[WorldWatch]] = weakref.WeakSet()

    def __init__(self, groups: Sequence[Any], end: Callable[[str], None], poll_s: float) -> None:
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._link = StoreLink(numbered_store("watch", self._rank), STORE_S)
        self.failure: str | None = None
        self.steps = 0
        """The steps of a pipeline that this rank has begun."""
        self._end = weakref.WeakMethod(end)  # an engine that goes out of scope ends its watch
        self._groups = [group for group in groups if group is not None]
        self._neighbours: dict[int, Identity] = {}
        self._unseen, self._polls = set(range(self._world_size)) - {self._rank}, 0
        self._identity = Identity.of_this_process()
        identity = json.dumps(asdict(self._identity))
        with self._link.starting():
            self._link.run(lambda store: store.set(f"identity/{self._rank}", identity))
        self._is_closed = threading.Event()
        self._process = os.getpid()
        self._on_exit = atexit.register(self.end)
        self._of_process.add(self)
        self._thread = start_thread(_poll, self, self._is_closed, poll_s, name="shardwise-watch")

    def leave(self) -> None:
        self._close("its engine was destroyed")

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a step that every rank of the mesh runs: an exception in it stops all of them."""
        self.raise_failure()
        self.steps += 1
        try:
            yield
        except Exception as error:
            self.raise_reason(error)
            self._decide(self._reason(error))
            raise

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Around other work of all ranks: an error that a lost rank causes is raised as what it is."""
        self.raise_failure()
        try:
            yield
        except Exception as error:
            self.raise_reason(error)
            raise

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise DisagreementError(self.failure)

    def raise_reason(self, error: Exception) -> None:
        """Raise the verdict that an error is a consequence of, if there is one: torch's schedules wrap errors."""
        causes = list(_causes(error))
        disagreement = next((cause for cause in causes if isinstance(cause, DisagreementError)), None)
        is_consequence = disagreement is not None or any(map(_is_of_connections, causes))
        deadline = time.monotonic() + (ANSWER_S if is_consequence else 0.0)
        while self.failure is None and time.monotonic() < deadline:
            time.sleep(0.1)
        if self.failure is not None:
            raise DisagreementError(self.failure) from error
        if disagreement is not None:  # ranks of other axes wait too; a ZeRO group counts its own ranks
            raise DisagreementError(self._decide(f"in the ZeRO group of rank {self._rank}, {disagreement}")) from error

    # The thread

    def poll(self) -> None:
        if self._end() is None:
            self._close("its engine is gone")
        elif self.failure is None and (verdict := self._find()) is not None:
            self._fail(verdict)

    def _find(self) -> str | None:
        if (verdict := self._read("verdict")) is not None:
            return verdict
        self._look_around()
        for rank, identity in self._neighbours.items():
            condition, text = see_process(rank, identity)
            if condition is Condition.ENDED and self._read(f"left/{rank}") is None:
                return self._decide(f"rank {rank} died, so none of the ranks can continue: {text}.\n{_READ_ERROR}")
        if self.steps and (left := self._read("left")) is not None:
            rank, steps, why = json.loads(left)
            if steps < self.steps:
                text = f"rank {rank} left after {steps} steps, and others run step {self.steps}: {why}"
                return self._decide(f"{text}; so none of the ranks can continue.\n{_ADVICE}")
        return None

    def _look_around(self) -> None:
        """Know the processes of this host that have joined. Others are asked for less and less often."""
        self._polls += 1
        if not self._unseen or self._polls & (self._polls - 1):
            return
        keys = {rank: f"identity/{rank}" for rank in self._unseen}

        def read(store: Any) -> dict[int, bytes]:
            return {rank: store.get(key) for rank, key in keys.items() if store.check([key])}

        found = {rank: Identity(**json.loads(text)) for rank, text in self._link.run(read).items()}
        self._unseen -= found.keys()
        self._neighbours |= {rank: each for rank, each in found.items() if each.view == self._identity.view}

    def _fail(self, verdict: str) -> None:
        watches = [each for each in self._of_process if each.failure is None and not each._is_closed.is_set()]
        for watch in watches:
            watch.failure = verdict
        for watch in watches:
            if (end := watch._end()) is not None:
                end(verdict)
        process_groups.break_off(list(dict.fromkeys(group for watch in watches for group in watch._groups)))

    # The store

    def _read(self, key: str) -> str | None:
        return self._link.run(lambda store: store.get(key).decode() if store.check([key]) else None)

    def _decide(self, text: str) -> str:
        """Write the verdict unless there is one already; the one that stands."""
        with contextlib.suppress(RuntimeError):  # the store is gone: this rank's own text is all there is
            verdict: bytes = self._link.run(lambda store: store.compare_set("verdict", "", text))
            return verdict.decode()
        return text

    def _reason(self, error: BaseException) -> str:
        *_, first = _causes(error)
        what = f"rank {self._rank} was stopped by {type(first).__name__}: {str(first).partition(chr(10))[0]}"
        return f"{what}; so none of the ranks can continue.\n{_READ_ERROR}"

    def _close(self, why: str) -> None:
        if self._is_closed.is_set() or os.getpid() != self._process:
            return
        self._is_closed.set()
        atexit.unregister(self._on_exit)
        told = json.dumps([self._rank, self.steps, why])
        with contextlib.suppress(RuntimeError):
            self._link.run(lambda store: store.set(f"left/{self._rank}", told))
            self._link.run(lambda store: store.compare_set("left", "", told))
        if threading.current_thread() is not self._thread:
            self._thread.join(STORE_S)
            self._link.close()

    def end(self) -> None:
        """When the interpreter ends."""
        error = ending_error()
        if error is not None and self.failure is None:
            self._decide(self._reason(error))
        self._close("its process ended")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what it was raised from."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _is_of_connections(error: BaseException) -> bool:
    """Whether an error may be the consequence of a rank that was lost: backends raise them as RuntimeErrors."""
    words = ("gloo", "nccl", "connection", "timed out", "closed", "aborted")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def _poll(watch: WorldWatch, is_closed: threading.Event, poll_s: float) -> None:
    while not is_closed.wait(poll_s):
        try:
            watch.poll()
        except Exception:  # the store may be out of reach; if it stays so, the agreement reports it
            _LOG.debug("the ranks of other axes could not be watched in this poll", exc_info=True)
