"""How a rank reaches a verdict: one that waits (`Jury`), and one that lost its connections (`Inquiry`)."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardwise.agreement import judge as words
from shardwise.agreement.board import JUDGES, Board, Pace
from shardwise.agreement.judge import Finding, judge
from shardwise.agreement.posts import Answer, Place, Post, RankState, Silence
from shardwise.agreement.sight import main_place, see_process
from shardwise.machine.process import Condition

ANSWER_S = 4.0
"""How long a rank whose connections broke waits for the other ranks to answer that they live; while a rank waits, the
seconds between two roll calls."""

Absent = dict[int, tuple[Condition, str]]
"""Ranks that did not answer, and what this process can see of their processes."""


class Inquiry:
    """Why connections broke: which ranks have died, stand still, are late, or left. For ranks that lost theirs.

    A death breaks the connections of all ranks at once. A few of them find out why: the first to enlist, and the first
    of those that can see a process that died. The others wait for the verdict. If none comes, those that found out may
    be lost as well: the others enlist for another round, in which again a few find out. So the readings of all posts
    stay few, however many ranks lost their connections.

    `stops` returns the verdict that another thread of this rank has found.
    """

    def __init__(self, board: Board, rank: int, pace: Pace, timeout_s: float, stops: Callable[[], str | None]) -> None:
        self._board = board
        self._rank = rank
        self._pace = pace
        self._timeout_s = timeout_s
        self._stops = stops
        self._looked_s, self._saw_death = -math.inf, False

    def explain(self, at: Place | None, error: str) -> str:
        """The verdict after an error of the connections. This rank has posted that it lost them."""
        is_late = "timed out" in error.lower() or "timeout" in error.lower()
        self._looked_s = -math.inf
        for turn in itertools.count():
            self._board.hear(main_place)
            known, number = self._board.called, self._enlist(turn)
            if number <= JUDGES:
                break
            verdict = self._await_verdict(ANSWER_S + 2 * self._pace.ask_s)
            if verdict is not None:
                return verdict
        called, deadline = self._call(known, number, at), time.monotonic() + ANSWER_S
        while True:
            verdict = self._verdict()
            if verdict is not None:
                return verdict
            posts, answers, is_over = self._board.read(), self._board.answers(), time.monotonic() >= deadline
            absent = self.absent(posts, answers, called)
            if is_over or all(condition is Condition.ENDED for condition, _ in absent.values()):
                finding = judge(posts, answers)
                if finding is not None and finding.is_final:
                    return self._board.decide(finding.text)
                if is_over or absent or is_late:
                    return self._board.decide(self._describe(posts, answers, absent, is_late))
            time.sleep(self._pace.retry_s)

    def _enlist(self, turn: int) -> int:
        """This rank's number among those that enlisted in a round. Ranks that see a death count apart: they need not
        wait for answers."""
        number = self._board.enlist(f"inquiry/{turn}")
        return self._board.enlist(f"witnesses/{turn}") if number > JUDGES and self.sees_death() else number

    def sees_death(self) -> bool:
        """Whether a process on this host has died. Only a few ranks of a host look, and not in every poll."""
        if self._pace.stride == 1 or not self._board.is_witness:
            return False
        if not self._saw_death and time.monotonic() - self._looked_s > 2 * self._pace.ask_s:
            self._looked_s = time.monotonic()
            self._saw_death = any(each.look()[0] is Condition.ENDED for each in self._board.neighbours().values())
        return self._saw_death

    def absent(self, posts: Sequence[Post], answers: Sequence[Answer | None], called: int) -> Absent:
        """The ranks that have not answered a roll call and did not say that they leave."""
        absent = {}
        for rank, (post, answer) in enumerate(zip(posts, answers, strict=True)):
            if rank != self._rank and post.state is not RankState.GONE and (answer is None or answer.number < called):
                absent[rank] = see_process(rank, self._board.identities()[rank])
        return absent

    def _call(self, known: int, number: int, at: Place | None) -> int:
        """The number of a roll call that was made after number `known`: the first rank's, or one of this rank."""
        if number > 1:
            time.sleep(self._pace.retry_s)
            self._board.hear(main_place)
        if self._board.called == known:
            self._board.call_roll(at)
        return self._board.called

    def _await_verdict(self, seconds: float) -> str | None:
        deadline = time.monotonic() + seconds
        while (verdict := self._verdict()) is None and time.monotonic() < deadline:
            time.sleep(2 * self._pace.retry_s)
        return verdict

    def _verdict(self) -> str | None:
        self._board.hear(main_place)
        return self._stops() or self._board.verdict()

    def _describe(self, posts: Sequence[Post], answers: Sequence[Answer | None], absent: Absent, is_late: bool) -> str:
        texts = {rank: text for rank, (_, text) in absent.items()}
        may_have_died = (Condition.ENDED, Condition.UNKNOWN) if not is_late else (Condition.ENDED,)
        if any(condition not in may_have_died for condition, _ in absent.values()):
            return words.frozen(posts, texts, self._timeout_s if is_late else ANSWER_S, answers)
        if absent or not is_late:
            return words.died(posts, texts, answers)
        return words.late(posts, answers, self._timeout_s)


class _Question(NamedTuple):
    """The operation that all ranks were asked about, this rank's poll and time then, and the roll call's number."""

    at: Place
    polls: int
    asked_s: float
    number: int


class Jury:
    """What a rank that waits concludes from the posts and answers of all ranks. `frozen_s` is how long a rank may be
    silent."""

    def __init__(self, board: Board, inquiry: Inquiry, pace: Pace, frozen_s: float) -> None:
        self._board = board
        self._inquiry = inquiry
        self._pace = pace
        self._frozen_s = frozen_s
        self._silence = Silence()
        self._called = time.monotonic()
        self._suspicion: list[Post] | None = None
        self._question: _Question | None = None

    def hear(self, now_s: float) -> str | None:
        """The verdict, if there is news and it is one. `now_s` is this rank's own clock (see `Silence`)."""
        if not self._board.hear(main_place):
            return None
        self._heard(now_s)
        return self._board.verdict()

    def judge(self, polls: int, now_s: float) -> str | None:
        """The verdict of this rank, which has not moved for `polls` polls, if there is evidence for one."""
        return self._judge(polls, now_s) or self._listen(now_s)

    def _judge(self, polls: int, now_s: float) -> str | None:
        posts = self._board.read()
        finding = judge(posts)
        if finding is None:
            self._suspicion = None
            return None
        if self._has_heard_all(posts, polls) if finding.is_final else self._is_confirmed(posts):
            return self._decide(finding, posts, polls, now_s)
        return None

    def _has_heard_all(self, posts: list[Post], polls: int) -> bool:
        """Whether the other ranks have had the time to post where they are, so that the text can name all of them."""
        return polls > self._pace.patience or all(post.state is not RankState.RUNS for post in posts)

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

    def _decide(self, finding: Finding, posts: list[Post], polls: int, now_s: float) -> str | None:
        """Write the verdict; if ranks are at an operation that they have not described, ask for it first."""
        if finding.untold:
            if self._question is None or self._question.at != finding.at or self._question.polls > polls:
                self._call_roll(now_s, finding.at)
                self._question = _Question(finding.at, polls, now_s, self._board.called)
                return None
            answers = self._board.answers()
            finding = judge(posts, answers) or finding
            if any(self._may_still_tell(self._question, answers[rank], now_s) for rank in finding.untold):
                return None
        return self._board.decide(finding.text)

    def _may_still_tell(self, question: _Question, answer: Answer | None, now_s: float) -> bool:
        """Whether a rank has not answered the question yet, and has not had the time that a slow one may take."""
        has_answered = answer is not None and answer.number >= question.number
        return not has_answered and now_s - question.asked_s <= ANSWER_S

    def _listen(self, now_s: float) -> str | None:
        """Call the roll at intervals, and name the ranks that have died, or that were silent for too long."""
        if time.monotonic() - self._called > min(ANSWER_S, self._frozen_s / 4):
            self._call_roll(now_s)
        answers = self._board.answers()
        silent_s = self._silence.listen(answers, now_s)
        if max(silent_s) < min(ANSWER_S, self._frozen_s):
            return None
        posts = self._board.read()
        absent = self._inquiry.absent(posts, answers, self._board.called)
        ended = {rank: text for rank, (seen, text) in absent.items() if seen is Condition.ENDED and silent_s[rank]}
        frozen = {rank: text for rank, (_, text) in absent.items() if silent_s[rank] >= self._frozen_s}
        if ended:
            return self._board.decide(words.died(posts, ended, answers))
        return self._board.decide(words.frozen(posts, frozen, self._frozen_s, answers)) if frozen else None

    def _call_roll(self, now_s: float, asked: Place | None = None) -> None:
        self._board.call_roll(asked)
        self._heard(now_s)

    def _heard(self, now_s: float) -> None:
        self._called = time.monotonic()
        self._silence.hear(self._board.called, now_s)
