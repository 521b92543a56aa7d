"""What a rank that waits concludes from the posts and answers of all ranks: a verdict, a question, or nothing yet."""

from __future__ import annotations

import time

from shardwise.comm import inquiry
from shardwise.comm import judge as words
from shardwise.comm.board import Board
from shardwise.comm.inquiry import Inquiry
from shardwise.comm.judge import Finding, judge
from shardwise.comm.pace import Pace
from shardwise.comm.posts import Place, Post, RankState, Silence
from shardwise.comm.sight import main_place
from shardwise.machine.process import Condition


class Jury:
    """One rank's part in it. `frozen_s` is how long a rank may be silent."""

    def __init__(self, board: Board, inquiry: Inquiry, pace: Pace, frozen_s: float) -> None:
        self._board = board
        self._inquiry = inquiry
        self._pace = pace
        self._frozen_s = frozen_s
        self._silence = Silence()
        self._called = time.monotonic()
        self._suspicion: list[Post] | None = None
        self._question: tuple[Place, int] | None = None  # what all ranks were asked for, and in which poll

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
            if self._question is None or self._question[0] != finding.at or self._question[1] > polls:
                self._question = finding.at, polls
                self._call_roll(now_s, finding.at)
                return None
            finding = judge(posts, self._board.answers()) or finding
            if finding.untold and polls - self._question[1] <= self._pace.patience:
                return None
        return self._board.decide(finding.text)

    def _listen(self, now_s: float) -> str | None:
        """Call the roll now and then, and name the ranks that have died, or that were silent for too long."""
        if time.monotonic() - self._called > min(inquiry.ANSWER_S, self._frozen_s / 4):
            self._call_roll(now_s)
        answers = self._board.answers()
        silent_s = self._silence.listen(answers, now_s)
        if max(silent_s) < min(inquiry.ANSWER_S, self._frozen_s):
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
