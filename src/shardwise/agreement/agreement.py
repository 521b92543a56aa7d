"""Checks that all ranks issue the same operations, and stops every rank with one error when they cannot continue.

Every operation on the wire has a number in its *channel* and a description: verb, unit, size. A channel is an ordered
sequence of operations: all ranks issue the same operations in the same order in each. Gathers and reductions are two
channels, because they run side by side.

- Where the backend has tags (Gloo on the CPU), number and description make the tag of an operation's messages. An
  operation that another rank does not issue finds no partner: no data is mixed, and its ranks wait.
- Where it has none (NCCL), an operation that the ranks do not expect after those before it (see `log`) is issued only
  once all of them have met over it in the store.

Ranks that repeat what they did before send nothing for the check.

A thread polls about twice a second during training. A rank that waits posts what it issued last and what it waits
for. From the posts of all ranks `judge` decides, on evidence alone: two operations with one number, an operation that a
rank that is gone will never issue, or a standstill of all ranks. A rank that is only slow gives no such
evidence, and the others wait for it. The first rank to decide writes the verdict; every rank stops with its text.

While a rank waits, it calls the roll every few seconds, and the thread of every rank that lives answers, whatever its
main thread does. A rank that does not answer during the timeout of the process group has died, is stopped, or has lost
its host. If the store itself is gone or silent, every rank that waits stops on its own, and names the hosts.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch._C._distributed_c10d import Store

from shardwise.agreement import judge as words
from shardwise.agreement import jury
from shardwise.agreement.board import Board, Pace
from shardwise.agreement.log import Log, Outstanding, Ticket, Turns
from shardwise.agreement.posts import FAILED, Post, RankState
from shardwise.agreement.sight import RankHost, describe_holder, describe_hosts, outside_call
from shardwise.agreement.store_link import STORE_S, StoreSilentError
from shardwise.errors import DisagreementError
from shardwise.machine.process import ending_error, start_thread

T = TypeVar("T")
POLL_S = 0.5
POLL_VARIABLE = "SHARDWISE_AGREEMENT_POLL_S"
"""The environment variable that replaces `POLL_S`."""
FROZEN_VARIABLE = "SHARDWISE_FROZEN_S"
"""The environment variable for how long a rank may be silent while others wait for it, at most and by default the
timeout of the process group. Its thread answers unless the process stands still, or a call holds Python's lock."""
_ARRIVAL_S = 1e-4  # between two ranks that enter a meeting: the store serves them in less, but they are not in step
_LOG = logging.getLogger("shardwise")


class Wire(NamedTuple):
    """What the agreement needs of the groups: end all waits in them, the error that a device met (None if none), and
    the timeout of an operation."""

    wake: Callable[[], None]
    error: Callable[[], str | None]
    timeout_s: float


class Look(NamedTuple):
    """The operation that a rank waits for, the call outside of the engine in which it waits, and whether it has moved
    since the last poll."""

    ticket: Ticket | None
    outside: str
    has_moved: bool


class Agreement:
    """Numbers this rank's operations, posts where it waits, and stops it when the ranks cannot continue.

    `wire.wake` ends the waits of this rank and of its peers, after a verdict; the polling thread calls it too.
    `is_world` says that all processes of the job take part, so that a wait in torch.distributed is a wait for one of
    them.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        is_world: bool,
        wire: Wire,
        poll_s: float = POLL_S,
    ) -> None:
        self.failure: str | None = None
        self.is_ending = False
        self.poll_s = poll_s
        self.frozen_s = min(float(os.environ.get(FROZEN_VARIABLE, wire.timeout_s)), wire.timeout_s)
        self._send_limit = timedelta(seconds=self.frozen_s)
        self._wire = wire
        self._rank = rank
        self._world_size = world_size
        self._is_world = is_world
        self._waits_for: Ticket | None = None
        self._log = Log()
        self._turns = Turns()  # without tags: the operation that followed the last two
        self._outstanding = Outstanding(poll_s)
        self._pace = Pace.of(world_size, poll_s)
        self._board = Board(store, rank, world_size, min(STORE_S, self.frozen_s), self._log.text)
        self._inquiry = jury.Inquiry(self._board, rank, self._pace, wire.timeout_s, lambda: self.failure)
        self._holder = describe_holder(store)
        self.hosts: Sequence[RankHost] = ()
        self._jury = jury.Jury(self._board, self._inquiry, self._pace, self.frozen_s)
        self._ran_s = 0.0  # how long this rank has polled: time in which its process stood still does not count
        self._polled = self._asked = time.monotonic()
        self._reached = time.monotonic()  # when this rank last reached the store, or moved
        self._state = RankState.RUNS
        self._posting = threading.Lock()
        self._seen: tuple[Any, Any] = (None, None)
        self._polls = 0  # in how many polls in a row this rank did not move
        self._is_closed = threading.Event()
        # The thread and the exit handler hold weak references: an engine that goes out of scope ends them.
        reference = weakref.ref(self)
        self._on_exit = atexit.register(partial(_report_exit, reference))  # one object each: `close` unregisters it
        self._process = os.getpid()
        self._thread = start_thread(_watch, reference, self._is_closed, poll_s, name="shardwise")

    # Called by the communicator

    def name_units(self, names: Sequence[str]) -> None:
        """The units in an order that is the same on all ranks."""
        self._turns.name_units(names)

    def issue(self, channel: str, text: str, has_tags: bool, unit: str = "", is_announced: bool = False) -> Ticket:
        """Number an operation that is about to be issued, of a `unit` or of none. Without tags, wait for all ranks if
        it is not the one to expect after the last two, nor follows from what the one before sent: `is_announced`."""
        self._raise_failure()
        ticket = self._log.add(channel, text)
        if not has_tags and not self._turns.take(channel, text, unit, is_announced):
            self._meet(ticket)
        return ticket

    def note(self, channels: Sequence[str], text: str) -> None:
        """Number something that sends nothing but must happen on all ranks or on none: a pass that broke off."""
        if self.failure is not None:
            return
        for channel in channels:
            self._log.add(channel, text)
            self._turns.restart(channel, text)
        with contextlib.suppress(RuntimeError):  # the store is gone: the user's own error is the one to show
            self._post(RankState.RUNS)

    def wait(self, ticket: Ticket, works: list[Any], sends: list[Any]) -> None:
        """Wait for the works of an operation, each once. A broken connection is raised as its reason.

        Over Gloo, a send that has begun when its connection breaks never ends. Once everything has been received, all
        ranks have issued the operation, so that its sends end soon even if a rank is slow: they get a limit.
        """
        self._waits_for = ticket
        try:
            while works:
                works.pop(0).wait()
            while sends:
                sends.pop(0).wait(self._send_limit)
        except RuntimeError as error:
            works.clear()
            sends.clear()
            if not self.is_ending:
                self.explain(ticket, error)
        finally:
            self._waits_for = None

    def track(self, ticket: Ticket, work: Any) -> None:
        """Watch an operation that only the device waits for."""
        self._outstanding.add(ticket, work)

    def call_backend(self, ticket: Ticket, call: Callable[..., T], *args: Any, **options: Any) -> T:
        """What `call` returns, which issues an operation. It may wait for other ranks, to create a communicator; an
        error of the backend is raised as its reason: which rank is gone, and what the others wait for."""
        self._waits_for = ticket
        try:
            return call(*args, **options)
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError):
                self.explain(ticket, error)
            raise
        finally:
            self._waits_for = None

    def check(self) -> None:
        """Raise the reason if operations have been broken off, on this rank or by the device's watchdog."""
        self._raise_failure()
        error = self._wire.error()
        if error is not None:
            self.explain(None, RuntimeError(error))

    @property
    def is_idle(self) -> bool:
        """Whether every operation that was tracked has ended."""
        return self._outstanding.oldest() is None

    def close(self, why: str = "its engine was destroyed") -> None:
        """Stop polling, and tell the ranks that still wait for this one. A process forked from it tells nothing."""
        if self._is_closed.is_set() or os.getpid() != self._process:
            return
        self._is_closed.set()
        self._outstanding.close()
        atexit.unregister(self._on_exit)
        with contextlib.suppress(RuntimeError):
            self._post(RankState.GONE, detail=why)
        if threading.current_thread() is not self._thread:
            self._thread.join(STORE_S)
            self._board.close()

    def leave(self) -> None:
        """Close when the interpreter ends, and tell the exception that ended the process."""
        error = ending_error()
        self.close(f"{FAILED} {type(error).__name__}: {error}" if error is not None else "its process ended")

    # Called by the polling thread

    def poll(self) -> None:
        """Look where this rank is; post it and read what others post if it is time to; stop it if the ranks cannot
        continue."""
        now = time.monotonic()
        self._ran_s += min(now - self._polled, 1.0 + 2 * self.poll_s)
        self._polled = now
        look = self._look()
        try:
            verdict = self._find_verdict(look)
        except RuntimeError as error:
            verdict = self._judge_without_store(look, error)
        if verdict is not None and self.failure is None:
            self.failure = verdict
            self._wire.wake()

    def _find_verdict(self, look: Look) -> str | None:
        # While this rank closes, connections that end are those of ranks that closed before it.
        error = self._wire.error() if self.failure is None and not self.is_ending else None
        waits = not look.has_moved and self.failure is None
        is_judge = waits and (self._pace.is_judge(self._rank, self._polls) or self._inquiry.sees_death())
        if error is None and not self._is_due(waits, is_judge):
            return None
        self._asked = self._polled
        verdict = self._jury.hear(self._ran_s)
        if verdict is None and error is not None:
            verdict = self._explain_loss(look.ticket, error)
        if verdict is None and self.failure is None:
            self._post_state(look)
            if is_judge:
                verdict = self._jury.judge(self._polls, self._ran_s)
        self._reached = time.monotonic()
        return verdict

    def _is_due(self, waits: bool, is_judge: bool) -> bool:
        """Whether to ask the store in this poll. A rank that begins to wait posts that soon."""
        begins = waits and self._state is RankState.RUNS
        return self._polled - self._asked > (0.45 if begins or is_judge else 0.9) * self._pace.ask_s

    def _look(self) -> Look:
        """What this rank waits for, in the engine or outside of it, and whether it has moved since the last poll."""
        ticket, outside = self._waits_for or self._outstanding.oldest(), outside_call() if self._is_world else None
        seen = (ticket, outside)
        has_moved = seen != self._seen or seen == (None, None)
        self._seen, self._polls = seen, 0 if has_moved else self._polls + 1
        return Look(ticket, outside[0] if outside and not ticket else "", has_moved)

    def _post_state(self, look: Look) -> None:
        if not look.has_moved:
            self._post(RankState.WAITS if look.ticket else RankState.OUTSIDE, look.ticket, look.outside)
        elif self._state is not RankState.RUNS:
            self._post(RankState.RUNS)

    def _judge_without_store(self, look: Look, error: RuntimeError) -> str | None:
        """A verdict of this rank alone, if it waits and has not reached the store for a while."""
        if look.ticket is None or look.has_moved:
            self._reached = time.monotonic()
            return None
        is_silent, silent_s = isinstance(error, StoreSilentError), time.monotonic() - self._reached
        if silent_s < (self.frozen_s if is_silent else jury.ANSWER_S):
            return None
        why = f"has not answered for {silent_s:.0f} s" if is_silent else "is gone"
        return self._describe_store_loss(look.ticket, why)

    # Inside

    def _post(self, state: RankState, ticket: Ticket | None = None, detail: str = "") -> None:
        at = ticket.place if ticket is not None else None
        with self._posting:
            if self._state is RankState.GONE or (self._state is RankState.LOST and state is not RankState.GONE):
                return  # final: the polling thread may be inside a poll when the main thread closes or meets an error
            self._state = state
            issued, text = self._log.recent(ticket, self._pace.window), ticket.text if ticket is not None else ""
            self._board.post(Post(state, at, issued, detail, self._polls, text))

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise DisagreementError(self.failure)

    def _meet(self, ticket: Ticket) -> None:
        """Wait until every rank is about to issue this very operation."""
        self._waits_for = ticket
        name = f"{ticket.channel}/{ticket.number}/{ticket.text}"
        try:
            missing = self._board.arrive(name, self._raise_failure)
            pause_s, has_met = missing * _ARRIVAL_S, not missing
            while not has_met:
                time.sleep(min(pause_s, self._pace.meeting_s))
                self._raise_failure()
                has_met = self._board.has_met(name, self._raise_failure)
                pause_s *= 2
        except RuntimeError as error:
            if isinstance(error, DisagreementError):
                raise
            self.explain(ticket, error)
        finally:
            self._waits_for = None

    def explain(self, ticket: Ticket | None, error: Exception) -> NoReturn:
        """Raise the reason why a connection broke or an operation timed out: a verdict, or a rank that is gone."""
        self._waits_for = None
        try:
            verdict = self.failure or self._explain_loss(ticket, str(error))
        except RuntimeError as lost:
            why = "does not answer" if isinstance(lost, StoreSilentError) else "is gone as well"
            verdict = self._describe_store_loss(ticket, why)
        self.failure = verdict
        # `poll` wakes no rank once there is a failure, and ranks that wait for this one alone must stop.
        self._wire.wake()
        raise DisagreementError(verdict) from error

    def _explain_loss(self, ticket: Ticket | None, error: str) -> str:
        """The verdict after an error of the connections: which ranks answer, which have died, which are late."""
        self._post(RankState.LOST, ticket)
        return self._inquiry.explain(ticket.place if ticket is not None else None, error)

    def _describe_store_loss(self, ticket: Ticket | None, why: str) -> str:
        operation = ticket.text if ticket is not None else "the next operation"
        return words.without_store(self._rank, operation, self._holder, why, describe_hosts(self.hosts, self._rank))


def poll_interval_s() -> float:
    """Seconds between two polls: `POLL_S`, or what the environment variable SHARDWISE_AGREEMENT_POLL_S says."""
    return float(os.environ.get(POLL_VARIABLE, POLL_S))


def _watch(reference: weakref.ref[Agreement], is_closed: threading.Event, poll_s: float) -> None:
    while not is_closed.wait(poll_s):
        agreement = reference()
        if agreement is None:
            return
        try:
            agreement.poll()
        except Exception:  # a thread that ends looks like a process that stands still
            _LOG.exception("the agreement of ranks could not be checked in this poll")
        del agreement  # while the thread sleeps, it must not keep the engine alive


def _report_exit(reference: weakref.ref[Agreement]) -> None:
    agreement = reference()
    if agreement is not None:
        agreement.leave()
