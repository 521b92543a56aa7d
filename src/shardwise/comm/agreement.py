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
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d

from shardwise.comm.judge import judge, lost
from shardwise.comm.posts import Board, Operations, Post, RankState
from shardwise.errors import DisagreementError

POLL_S = 0.5
POLL_VARIABLE = "SHARDWISE_AGREEMENT_POLL_S"
"""The environment variable that replaces `POLL_S`."""
ANSWER_S = 4.0
"""How long a rank whose connections broke waits for the other ranks to answer that they live."""
JUDGES = 8
"""About how many ranks read the posts of all ranks in one poll, however many wait: the store serves one at a time."""
_PATIENCE = 3  # polls
_REMEMBERED, _POSTED = 4096, 256
_NEVER_WAIT = ("isend", "irecv")
_SPREAD = 0x9E3779B1  # an odd constant, so that neighbouring numbers give tags far apart


class Ticket(NamedTuple):
    """One operation: its channel, its number there, its description, and the tag of its messages."""

    channel: str
    number: int
    text: str
    tag: int


class Log:
    """What this rank has issued in each channel.

    >>> log = Log()
    >>> log.add("gather", "gather head").number, log.add("gather", "gather head").number
    (0, 1)
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._texts: dict[str, deque[str]] = {}

    def add(self, channel: str, text: str) -> Ticket:
        number = self._counts.get(channel, 0)
        self._counts[channel] = number + 1
        self._texts.setdefault(channel, deque(maxlen=_REMEMBERED)).append(text)
        return Ticket(channel, number, text, (zlib.crc32(text.encode()) ^ (number * _SPREAD)) & 0x7FFFFFFF)

    def recent(self, ticket: Ticket | None) -> dict[str, Operations]:
        """The last operations of each channel; in the channel of `ticket`, from some time before it to the last."""
        recent = {}
        for channel, texts in list(self._texts.items()):  # a copy: the main thread may add a channel meanwhile
            wanted = _POSTED + (self._counts[channel] - ticket.number if ticket and ticket.channel == channel else 0)
            shown = list(texts)[-wanted:]
            recent[channel] = (self._counts[channel] - len(shown), shown)
        return recent


class Agreement:
    """Numbers this rank's operations, posts where it waits, and stops it when the ranks cannot continue.

    `wake` ends the waits of this rank and of its peers, after a verdict; the polling thread calls it too. `is_world`
    says that all processes of the job take part, so that a wait in torch.distributed is a wait for one of them.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        is_world: bool,
        wake: Callable[[], None],
        poll_s: float = POLL_S,
    ) -> None:
        self.failure: str | None = None
        self.is_ending = False
        self.poll_s = poll_s
        self._wake = wake
        self._rank = rank
        self._world_size = world_size
        self._is_world = is_world
        self._waits_for: Ticket | None = None
        self._log = Log()
        self._next: dict[tuple[str, ...], str] = {}  # without tags: the operation that followed the last two
        self._last: dict[str, tuple[str, ...]] = {}
        self._outstanding: deque[tuple[Ticket, Any]] = deque()
        self._board = Board(store, rank, world_size)
        self._state = RankState.RUNS
        self._posting = threading.Lock()
        self._seen: tuple[Any, Any] = (None, None)
        self._polls = 0  # in how many polls in a row this rank did not move
        self._suspicion: list[Post] | None = None
        self._is_closed = threading.Event()
        # The thread and the exit handler hold weak references: an engine that goes out of scope ends them.
        reference = weakref.ref(self)
        self._on_exit = atexit.register(partial(_report_exit, reference))  # one object each: `close` unregisters it
        watched = (reference, self._is_closed, poll_s)
        threading.Thread(target=_watch, args=watched, name="shardwise", daemon=True).start()

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

    def wait(self, ticket: Ticket, works: list[Any]) -> None:
        """Wait for the works of an operation, each once. A broken connection is raised as its reason."""
        self._waits_for = ticket
        try:
            while works:
                works.pop(0).wait()
        except RuntimeError as error:
            works.clear()
            if not self.is_ending:
                self.explain(ticket, error)
        finally:
            self._waits_for = None

    def track(self, ticket: Ticket, work: Any) -> None:
        """Let the polling thread watch an operation that only the device waits for."""
        self._outstanding.append((ticket, work))

    def close(self, why: str = "its engine was destroyed") -> None:
        """Stop polling, and tell the ranks that still wait for this one."""
        if not self._is_closed.is_set():
            self._is_closed.set()
            atexit.unregister(self._on_exit)
            with contextlib.suppress(RuntimeError):
                self._post(RankState.GONE, detail=why)

    # Called by the polling thread

    def poll(self) -> None:
        """Post this rank's state, and stop it if the ranks cannot continue."""
        verdict = self._board.verdict()
        if verdict is None:
            self._post_state()
            if self._state in (RankState.WAITS, RankState.OUTSIDE) and self._is_judge():
                verdict = self._judge()
        if verdict is not None and self.failure is None:
            self.failure = verdict
            self._wake()

    def _post_state(self) -> None:
        ticket, outside = self._waits_for or self._unfinished(), _outside_call() if self._is_world else None
        seen = (ticket, outside)
        has_moved = seen != self._seen or seen == (None, None)
        self._seen, self._polls = seen, 0 if has_moved else self._polls + 1
        if not has_moved:
            state = RankState.WAITS if ticket else RankState.OUTSIDE
            self._post(state, ticket, outside[0] if outside and not ticket else "")
        elif self._state is not RankState.RUNS:
            self._post(RankState.RUNS)
        if self._board.owes_answer():
            self._board.answer()

    def _unfinished(self) -> Ticket | None:
        while self._outstanding and self._outstanding[0][1].is_completed():
            self._outstanding.popleft()
        return self._outstanding[0][0] if self._outstanding else None

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
            if self._state is RankState.GONE:
                return  # final: the polling thread may still be inside a poll when the main thread closes
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
            self._board.arrive(name)
            while not self._board.has_met(name):
                self._raise_failure()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.05)
        finally:
            self._waits_for = None

    def explain(self, ticket: Ticket, error: RuntimeError) -> NoReturn:
        """Raise the reason why a connection broke: a verdict, or a rank that is gone."""
        self._waits_for = None
        try:
            self._post(RankState.LOST, ticket)
            self._board.alarm()
            verdict = self._await_verdict()
        except RuntimeError:
            verdict = (
                f"rank {self._rank} waited for {ticket.text} when its connections broke; the store through which ranks "
                "exchange their states is gone as well: the process that holds it has ended"
            )
        self.failure = verdict
        # `poll` wakes no rank once there is a failure, and ranks that wait for this one alone must stop.
        self._wake()
        raise DisagreementError(verdict) from error

    def _await_verdict(self) -> str:
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            verdict = self.failure or self._board.verdict()
            if verdict is not None:
                return verdict
            posts, answered = self._board.read(), self._board.answered()
            if all(answers or post.state is RankState.GONE for post, answers in zip(posts, answered, strict=True)):
                finding = judge(posts)
                if finding is not None and finding.is_final:
                    return self._board.decide(finding.text)
            time.sleep(0.1)
        return self._board.decide(lost(self._board.read(), self._board.answered()))


def poll_interval_s() -> float:
    """Seconds between two polls: `POLL_S`, or what the environment variable SHARDWISE_AGREEMENT_POLL_S says."""
    return float(os.environ.get(POLL_VARIABLE, POLL_S))


def _outside_call() -> tuple[str, int] | None:
    """The call of torch.distributed in which the main thread waits, if any, and what tells it from the next such call.

    Two calls in a row may have frames of one identity, so a rank that sends all the time could look like one that
    waits. Calls that never wait are known by their names: test_agreement.test_a_rank_that_sends_does_not_wait_outside.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or frame.f_code.co_filename != c10d.__file__ or frame.f_code.co_name in _NEVER_WAIT:
        return None
    name, identity, caller = frame.f_code.co_name, id(frame), frame.f_back
    while caller is not None and caller.f_globals.get("__name__", "").startswith("torch."):
        caller = caller.f_back
    place = f" at {caller.f_code.co_filename}:{caller.f_lineno}" if caller is not None else ""
    return f"{name}{place}", identity


def _watch(reference: weakref.ref[Agreement], is_closed: threading.Event, poll_s: float) -> None:
    while not is_closed.wait(poll_s):
        agreement = reference()
        if agreement is None:
            return
        try:
            agreement.poll()
        except RuntimeError:
            return  # the store is gone: a rank that waits gets its error when its connections break
        del agreement  # while the thread sleeps, it must not keep the engine alive


def _report_exit(reference: weakref.ref[Agreement]) -> None:
    agreement = reference()
    if agreement is not None:
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        agreement.close(f"it ended with {type(error).__name__}: {error}" if error is not None else "its process ended")
