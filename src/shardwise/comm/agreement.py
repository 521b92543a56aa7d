"""Whether all ranks issue the same operations, and what becomes of them if they do not.

Every operation on the wire is numbered in its stream (gathers and reductions run side by side, each in one order) and
described: verb, unit, size. Where the backend knows tags, number and description make the tag of its messages, so an
operation that another rank does not issue finds no partner: nothing is mixed, its ranks wait. Where it does not, an
operation that is not the one that followed the last time is issued only once all ranks have met over it in the store.
Ranks that keep to what they did before send nothing for the check.

Beside the training a thread looks about twice a second. A rank that waits posts where: what it issued of late, what it
waits for. From the posts of all, `judge` decides, on evidence alone: two operations under one number, an operation that
a rank which is gone will never issue, or every rank at a standstill. A rank that is merely slow is none of these and is
waited for. The first to decide writes the verdict; every rank stops with its text.
"""

from __future__ import annotations

import atexit
import contextlib
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
from shardwise.comm.posts import Board, Operations, Post, State
from shardwise.errors import DisagreementError

LOOK_S = 0.5
ANSWER_S = 4.0
"""How long a rank whose connections broke waits for the others to say that they are alive."""
JUDGES = 8
"""About so many ranks read the posts of all in each look, however many wait."""
_PATIENCE = 3  # looks
_REMEMBERED, _POSTED = 4096, 256
_NEVER_WAIT = ("isend", "irecv")
_SPREAD = 0x9E3779B1


class Ticket(NamedTuple):
    """One operation: its stream, its number there, what it is, and the tag of its messages."""

    stream: str
    number: int
    text: str
    tag: int


class Log:
    """What this rank has issued, stream by stream.

    >>> log = Log()
    >>> log.add("gather", "gather head").number, log.add("gather", "gather head").number
    (0, 1)
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._texts: dict[str, deque[str]] = {}

    def add(self, stream: str, text: str) -> Ticket:
        number = self._counts.get(stream, 0)
        self._counts[stream] = number + 1
        self._texts.setdefault(stream, deque(maxlen=_REMEMBERED)).append(text)
        return Ticket(stream, number, text, (zlib.crc32(text.encode()) ^ (number * _SPREAD)) & 0x7FFFFFFF)

    def recent(self, ticket: Ticket | None) -> dict[str, Operations]:
        """The last operations of each stream; of the one in which `ticket` is waited for, all from a while before."""
        recent = {}
        for stream, texts in list(self._texts.items()):  # at once: the thread that looks is not the one that adds
            wanted = _POSTED + (self._counts[stream] - ticket.number if ticket and ticket.stream == stream else 0)
            shown = list(texts)[-wanted:]
            recent[stream] = (self._counts[stream] - len(shown), shown)
        return recent


class Agreement:
    """Numbers this rank's operations, posts where it waits, and stops it when the ranks cannot go on."""

    def __init__(self, store: Store, rank: int, world_size: int, is_world: bool) -> None:
        self.failure: str | None = None
        self.is_ending = False
        self.wake: Callable[[], None] = lambda: None
        self._rank = rank
        self._world_size = world_size
        self._is_world = is_world
        self._waits_for: Ticket | None = None
        self._log = Log()
        self._next: dict[tuple[str, ...], str] = {}
        self._last: dict[str, tuple[str, ...]] = {}
        self._outstanding: deque[tuple[Ticket, Any]] = deque()
        self._board = Board(store, rank, world_size)
        self._state = State.RUNS
        self._posting = threading.Lock()
        self._seen: tuple[Any, Any] = (None, None)
        self._looks = 0
        self._suspicion: list[Post] | None = None
        self._is_closed = threading.Event()
        reference = weakref.ref(self)
        self._on_exit = atexit.register(partial(_tell_end, reference))  # of its own: `close` takes it back
        threading.Thread(target=_watch, args=(reference, self._is_closed), name="shardwise", daemon=True).start()

    # For those who communicate

    def issue(self, stream: str, text: str, has_tags: bool) -> Ticket:
        """Number an operation that is about to be issued; without tags, meet the others first if it is a new turn."""
        self._raise_failure()
        ticket = self._log.add(stream, text)
        if not has_tags:
            turn = self._last.get(stream, (stream,))
            if self._next.get(turn) != text:
                self._meet(ticket)
                self._next[turn] = text
            self._last[stream] = (stream, turn[-1], text)
        return ticket

    def note(self, streams: Sequence[str], text: str) -> None:
        """Number something that sends nothing, but that all ranks must have met with: a pass broken off."""
        if self.failure is not None:
            return
        for stream in streams:
            self._log.add(stream, text)
            self._last[stream] = (stream, text)
        with contextlib.suppress(RuntimeError):  # the store is gone: the user's own error is the one to show
            self._post(State.RUNS)

    def wait(self, ticket: Ticket, works: list[Any]) -> None:
        """Wait for the works of an operation, each once. What breaks this off is told as what it is."""
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

    def follow(self, ticket: Ticket, work: Any) -> None:
        """Keep an eye on an operation that only the device waits for."""
        self._outstanding.append((ticket, work))

    def close(self, why: str = "its engine was destroyed") -> None:
        """Stop looking, and tell those who still wait for us."""
        if not self._is_closed.is_set():
            self._is_closed.set()
            atexit.unregister(self._on_exit)
            with contextlib.suppress(RuntimeError):
                self._post(State.GONE, detail=why)

    # For the thread

    def look(self) -> None:
        """See how this rank and the others are doing."""
        verdict = self._board.verdict()
        if verdict is None:
            self._tell()
            if self._state in (State.WAITS, State.OUTSIDE) and self._is_judge():
                verdict = self._judge()
        if verdict is not None and self.failure is None:
            self.failure = verdict
            self.wake()

    def _tell(self) -> None:
        ticket, outside = self._waits_for or self._unfinished(), _outside_call() if self._is_world else None
        seen = (ticket, outside)
        has_moved = seen != self._seen or seen == (None, None)
        self._seen, self._looks = seen, 0 if has_moved else self._looks + 1
        if not has_moved:
            self._post(State.WAITS if ticket else State.OUTSIDE, ticket, outside[0] if outside and not ticket else "")
        elif self._state is not State.RUNS:
            self._post(State.RUNS)
        if self._board.owes_answer():
            self._board.answer()

    def _unfinished(self) -> Ticket | None:
        while self._outstanding and self._outstanding[0][1].is_completed():
            self._outstanding.popleft()
        return self._outstanding[0][0] if self._outstanding else None

    def _is_judge(self) -> bool:
        return (self._looks + self._rank) % max(1, self._world_size // JUDGES) == 0

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
        """What is certain is said once the others have had the time to tell where they are."""
        return self._looks > _PATIENCE or all(post.state is not State.RUNS for post in posts)

    def _is_confirmed(self, posts: list[Post]) -> bool:
        """A standstill is believed if every rank has looked again and seen the same: posts are not of one moment."""
        before = self._suspicion
        if before is None or not all(new.is_like(old) for new, old in zip(posts, before, strict=True)):
            self._suspicion = posts
            return False
        return all(
            new.looks > old.looks or new.state in (State.GONE, State.LOST)
            for new, old in zip(posts, before, strict=True)
        )

    # Inside

    def _post(self, state: State, ticket: Ticket | None = None, detail: str = "") -> None:
        at = (ticket.stream, ticket.number) if ticket is not None else None
        with self._posting:
            if self._state is State.GONE:
                return
            self._state = state
            self._board.post(Post(state, at, self._log.recent(ticket), detail, self._looks))

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise DisagreementError(self.failure)

    def _meet(self, ticket: Ticket) -> None:
        """Wait until every rank is about to issue this very operation."""
        self._waits_for = ticket
        name, pause_s = f"{ticket.stream}/{ticket.number}/{ticket.text}", 1e-4
        try:
            self._board.arrive(name)
            while not self._board.has_met(name):
                self._raise_failure()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.05)
        finally:
            self._waits_for = None

    def explain(self, ticket: Ticket, error: RuntimeError) -> NoReturn:
        """A connection broke: because of a verdict, or because a rank is gone."""
        self._waits_for = None
        try:
            self._post(State.LOST, ticket)
            self._board.alarm()
            verdict = self._await_verdict()
        except RuntimeError:
            verdict = (
                f"rank {self._rank} waited for {ticket.text} when its connections broke; the store through which ranks "
                "tell each other where they are is gone as well: the process that holds it has ended"
            )
        self.failure = verdict
        self.wake()  # those who wait for this rank alone: its thread finds nothing left to do
        raise DisagreementError(verdict) from error

    def _await_verdict(self) -> str:
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            verdict = self.failure or self._board.verdict()
            if verdict is not None:
                return verdict
            posts, answered = self._board.read(), self._board.answered()
            if all(answers or post.state is State.GONE for post, answers in zip(posts, answered, strict=True)):
                finding = judge(posts)
                if finding is not None and finding.is_final:
                    return self._board.decide(finding.text)
            time.sleep(0.1)
        return self._board.decide(lost(self._board.read(), self._board.answered()))


def _outside_call() -> tuple[str, int] | None:
    """The call of torch.distributed in which the main thread waits, if any, and what tells it from the next such call.

    Frames of calls that come one after the other may have one identity: those that never wait are told by their names.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or frame.f_code.co_filename != c10d.__file__ or frame.f_code.co_name in _NEVER_WAIT:
        return None
    name, identity, caller = frame.f_code.co_name, id(frame), frame.f_back
    while caller is not None and caller.f_globals.get("__name__", "").startswith("torch."):
        caller = caller.f_back
    place = f" at {caller.f_code.co_filename}:{caller.f_lineno}" if caller is not None else ""
    return f"{name}{place}", identity


def _watch(reference: weakref.ref[Agreement], is_closed: threading.Event) -> None:
    while not is_closed.wait(LOOK_S):
        agreement = reference()
        if agreement is None:
            return
        try:
            agreement.look()
        except RuntimeError:
            return  # the store is gone: whoever waits is told when his connections break
        del agreement


def _tell_end(reference: weakref.ref[Agreement]) -> None:
    agreement = reference()
    if agreement is not None:
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        agreement.close(f"it ended with {type(error).__name__}: {error}" if error is not None else "its process ended")
