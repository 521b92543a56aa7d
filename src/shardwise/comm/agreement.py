"""Checks that all ranks issue the same operations, and stops every rank with one error when they cannot continue.

Every operation on the wire has a number in its *channel* and a description: verb, unit, size. A channel is an ordered
sequence of operations: all ranks issue the same operations in the same order in each. Gathers and reductions are two
channels, because they run side by side.

- Where the backend has tags (Gloo on the CPU), number and description make the tag of an operation's messages. An
  operation that another rank does not issue finds no partner: no data is mixed, and its ranks wait.
- Where it has none (NCCL), an operation that does not follow the same two operations as before is issued only once all
  ranks have met over it in the store.

Ranks that repeat what they did before send nothing for the check.

A thread beside the training polls about twice a second. A rank that waits posts what it issued last and what it waits
for. From the posts of all ranks `judge` decides, on evidence alone: two operations with one number, an operation that a
rank that is gone will never issue, or a standstill of all ranks. A slow rank is none of these, and the others wait for
it. The first rank to decide writes the verdict; every rank stops with its text.

While a rank waits, it calls the roll every few seconds, and the thread of every rank that lives answers, whatever its
main thread does. A rank that does not answer during the timeout of the process group has died, is stopped, or has lost
its host. If the store itself is gone or silent, every rank that waits stops by itself, and names the hosts.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch._C._distributed_c10d import Store

from shardwise.comm import judge as words
from shardwise.comm.hosts import RankHost, describe_holder, describe_hosts
from shardwise.comm.judge import judge
from shardwise.comm.log import Log, Ticket
from shardwise.comm.outstanding import Outstanding
from shardwise.comm.posts import FAILED, Board, Post, RankState
from shardwise.comm.roll_call import Silence
from shardwise.comm.sight import main_place, outside_call, see_process
from shardwise.comm.store_link import STORE_S, StoreSilentError
from shardwise.errors import DisagreementError
from shardwise.machine.process import Condition, start_thread

POLL_S = 0.5
POLL_VARIABLE = "SHARDWISE_AGREEMENT_POLL_S"
"""The environment variable that replaces `POLL_S`."""
ANSWER_S = 4.0
"""How long a rank whose connections broke waits for the other ranks to answer that they live; while a rank waits, the
seconds between two roll calls."""
FROZEN_VARIABLE = "SHARDWISE_FROZEN_S"
"""The environment variable for how long a rank may be silent while others wait for it, at most and by default the
timeout of the process group. Its thread answers unless the process stands still, or a call holds Python's lock."""
JUDGES = 8
"""About how many ranks read the posts of all ranks in one poll, however many wait: the store serves one at a time."""
_PATIENCE = 3  # polls
_LOG = logging.getLogger("shardwise")


class Wire(NamedTuple):
    """What the agreement needs of the groups: end all waits in them, the error that a device met (None if none), and
    the timeout of an operation."""

    wake: Callable[[], None]
    error: Callable[[], str | None]
    timeout_s: float


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
        self._next: dict[tuple[str, ...], str] = {}  # without tags: the operation that followed the last two
        self._last: dict[str, tuple[str, ...]] = {}
        self._outstanding = Outstanding(poll_s)
        self._board = Board(store, rank, world_size, min(STORE_S, self.frozen_s))
        self._holder = describe_holder(store)
        self.hosts: Sequence[RankHost] = ()
        self._silence = Silence(world_size)
        self._listened = self._called = time.monotonic()
        self._reached = time.monotonic()  # when this rank last reached the store, or moved
        self._state = RankState.RUNS
        self._posting = threading.Lock()
        self._seen: tuple[Any, Any] = (None, None)
        self._polls = 0  # in how many polls in a row this rank did not move
        self._suspicion: list[Post] | None = None
        self._is_closed = threading.Event()
        # The thread and the exit handler hold weak references: an engine that goes out of scope ends them.
        reference = weakref.ref(self)
        self._on_exit = atexit.register(partial(_report_exit, reference))  # one object each: `close` unregisters it
        self._process = os.getpid()
        self._thread = start_thread(_watch, reference, self._is_closed, poll_s, name="shardwise")

    # Called by the communicator

    def issue(self, channel: str, text: str, has_tags: bool) -> Ticket:
        """Number an operation that is about to be issued. Without tags, wait for all ranks if it is not the one that
        followed the last two operations before."""
        self._raise_failure()
        ticket = self._log.add(channel, text)
        if not has_tags:
            turn = self._last.get(channel, (channel,))
            if self._next.get(turn) != text:
                self._meet(ticket)
                self._next[turn] = text
            self._last[channel] = (channel, turn[-1], text)
        return ticket

    def note(self, channels: Sequence[str], text: str) -> None:
        """Number something that sends nothing but must happen on all ranks or on none: a pass that broke off."""
        if self.failure is not None:
            return
        for channel in channels:
            self._log.add(channel, text)
            self._last[channel] = (channel, text)
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

    @contextlib.contextmanager
    def issuing(self, ticket: Ticket) -> Iterator[None]:
        """Around the call that issues an operation. It may wait for other ranks, to create a communicator; an error of
        the backend is raised as its reason: which rank is gone, and what the others wait for."""
        self._waits_for = ticket
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError):
                self.explain(ticket, error)
            raise
        finally:
            self._waits_for = None

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
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        self.close(f"{FAILED} {type(error).__name__}: {error}" if error is not None else "its process ended")

    # Called by the polling thread

    def poll(self) -> None:
        """Post this rank's state, and stop it if the ranks cannot continue."""
        try:
            verdict = self._find_verdict()
            self._reached = time.monotonic()
        except RuntimeError as error:
            verdict = self._judge_without_store(error)
        if verdict is not None and self.failure is None:
            self.failure = verdict
            self._wire.wake()

    def _find_verdict(self) -> str | None:
        verdict = self._board.verdict()
        if verdict is None and self.failure is None and (error := self._wire.error()) is not None:
            verdict = self._explain_loss(self._waits_for or self._outstanding.oldest(), error)
        if verdict is None:
            self._post_state()
            if self._state in (RankState.WAITS, RankState.OUTSIDE) and self._is_judge():
                verdict = self._judge() or self._listen()
        return verdict

    def _look(self) -> tuple[Ticket | None, str, bool]:
        """What this rank waits for, in the engine or outside of it, and whether it has moved since the last poll."""
        ticket, outside = self._waits_for or self._outstanding.oldest(), outside_call() if self._is_world else None
        seen = (ticket, outside)
        has_moved = seen != self._seen or seen == (None, None)
        self._seen, self._polls = seen, 0 if has_moved else self._polls + 1
        return ticket, outside[0] if outside and not ticket else "", has_moved

    def _post_state(self) -> None:
        ticket, outside, has_moved = self._look()
        if not has_moved:
            self._post(RankState.WAITS if ticket else RankState.OUTSIDE, ticket, outside)
        elif self._state is not RankState.RUNS:
            self._post(RankState.RUNS)
        if self._board.answer_call(main_place):
            self._called = time.monotonic()

    def _is_judge(self) -> bool:
        return (self._polls + self._rank) % max(1, self._world_size // JUDGES) == 0

    def _judge(self) -> str | None:
        posts = self._board.read()
        finding = judge(posts)
        if finding is None:
            self._suspicion = None
            return None
        if self._has_heard_all(posts) if finding.is_final else self._is_confirmed(posts):
            return self._board.decide(finding.text)
        return None

    def _listen(self) -> str | None:
        """Call the roll now and then, and name the ranks that have died, or that were silent for too long."""
        now = time.monotonic()
        # Time in which this process stood still itself does not count: others may have stood still with it.
        elapsed_s = min(now - self._listened, 1.0 + 2 * self.poll_s * max(1, self._world_size // JUDGES))
        self._listened = now
        if now - self._called > min(ANSWER_S, self.frozen_s / 4):
            self._board.call_roll()
            self._called = now
        silent_s = self._silence.listen(self._board.called, self._board.answers(), elapsed_s)
        if max(silent_s) < min(ANSWER_S, self.frozen_s):
            return None
        posts = self._board.read()
        absent = {rank: seen for rank, seen in self._absent(posts).items() if silent_s[rank]}
        ended = {rank: text for rank, (condition, text) in absent.items() if condition is Condition.ENDED}
        frozen = {rank: text for rank, (_, text) in absent.items() if silent_s[rank] >= self.frozen_s}
        if ended:
            return self._board.decide(words.died(posts, ended))
        return self._board.decide(words.frozen(posts, frozen, self.frozen_s)) if frozen else None

    def _judge_without_store(self, error: RuntimeError) -> str | None:
        """A verdict of this rank alone, if it waits and has not reached the store for a while."""
        ticket, _, has_moved = self._look()
        if ticket is None or has_moved:
            self._reached = time.monotonic()
            return None
        is_silent, silent_s = isinstance(error, StoreSilentError), time.monotonic() - self._reached
        if silent_s < (self.frozen_s if is_silent else ANSWER_S):
            return None
        why = f"has not answered for {silent_s:.0f} s" if is_silent else "is gone"
        return self._describe_store_loss(ticket, why)

    def _has_heard_all(self, posts: list[Post]) -> bool:
        """Whether the other ranks have had the time to post where they are, so that the text can name all of them."""
        return self._polls > _PATIENCE or all(post.state is not RankState.RUNS for post in posts)

    def _is_confirmed(self, posts: list[Post]) -> bool:
        """Whether a standstill is real: every rank has polled again since the first suspicion and has not moved.

        Posts are not of one moment: while they are read, a rank may move on, so a single reading can show a standstill
        that never was.
        """
        before = self._suspicion
        if before is None or not all(new.is_like(old) for new, old in zip(posts, before, strict=True)):
            self._suspicion = posts
            return False
        return all(
            new.polls > old.polls or new.state in (RankState.GONE, RankState.LOST)
            for new, old in zip(posts, before, strict=True)
        )

    # Inside

    def _post(self, state: RankState, ticket: Ticket | None = None, detail: str = "") -> None:
        at = (ticket.channel, ticket.number) if ticket is not None else None
        with self._posting:
            if self._state is RankState.GONE or (self._state is RankState.LOST and state is not RankState.GONE):
                return  # final: the polling thread may be inside a poll when the main thread closes or meets an error
            self._state = state
            self._board.post(Post(state, at, self._log.recent(ticket), detail, self._polls))

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise DisagreementError(self.failure)

    def _meet(self, ticket: Ticket) -> None:
        """Wait until every rank is about to issue this very operation."""
        self._waits_for = ticket
        name, pause_s = f"{ticket.channel}/{ticket.number}/{ticket.text}", 1e-4
        try:
            self._board.arrive(name, self._raise_failure)
            while not self._board.has_met(name, self._raise_failure):
                self._raise_failure()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.05)
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
        is_late = "timed out" in error.lower() or "timeout" in error.lower()
        self._post(RankState.LOST, ticket)
        self._board.call_roll()
        called, deadline = self._board.called, time.monotonic() + ANSWER_S
        while True:
            verdict = self.failure or self._board.verdict()
            if verdict is not None:
                return verdict
            self._board.answer_call(main_place)
            posts, is_over = self._board.read(), time.monotonic() >= deadline
            absent = self._absent(posts, called)
            if is_over or all(condition is Condition.ENDED for condition, _ in absent.values()):
                finding = judge(posts)
                if finding is not None and finding.is_final:
                    return self._board.decide(finding.text)
                if is_over or absent or is_late:
                    return self._board.decide(self._describe_loss(posts, absent, is_late))
            time.sleep(0.1)

    def _absent(self, posts: Sequence[Post], called: int | None = None) -> dict[int, tuple[Condition, str]]:
        """The ranks that have not answered a roll call (any rank's last, unless said) and did not say that they leave;
        what this process can see of theirs."""
        called = self._board.called if called is None else called
        absent = {}
        ranks = zip(posts, self._board.answers(), self._board.identities(), strict=True)
        for rank, (post, answer, identity) in enumerate(ranks):
            if rank != self._rank and post.state is not RankState.GONE and (answer is None or answer.number < called):
                absent[rank] = see_process(rank, identity)
        return absent

    def _describe_store_loss(self, ticket: Ticket | None, why: str) -> str:
        operation = ticket.text if ticket is not None else "the next operation"
        return words.without_store(self._rank, operation, self._holder, why, describe_hosts(self.hosts, self._rank))

    def _describe_loss(self, posts: Sequence[Post], absent: dict[int, tuple[Condition, str]], is_late: bool) -> str:
        texts = {rank: text for rank, (_, text) in absent.items()}
        may_have_died = (Condition.ENDED, Condition.UNKNOWN) if not is_late else (Condition.ENDED,)
        if any(condition not in may_have_died for condition, _ in absent.values()):
            return words.frozen(posts, texts, self._wire.timeout_s if is_late else ANSWER_S)
        if absent or not is_late:
            return words.died(posts, texts)
        places = {rank: answer.place for rank, answer in enumerate(self._board.answers()) if answer is not None}
        return words.late(posts, places, self._wire.timeout_s)


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
