"""What a rank posts about itself for the other ranks, what it answers to roll calls, and how long it has not. Pure."""

from __future__ import annotations

import base64
import enum
import json
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

FAILED = "it ended with"
"""How the detail of a rank that an exception ended begins."""
_REMEMBERED = 1000  # roll calls
Operations = tuple[int, list[str]]
"""Consecutive operations of one channel: the number of the first, and the digests of all."""
Place = tuple[str, int]
"""A channel, and the number of an operation in it."""


def digest(text: str) -> str:
    """Five characters for an operation's description. The message of an exception is left out: it may differ from rank
    to rank (a device, a sample)."""
    return base64.b85encode(zlib.crc32(text.partition(": ")[0].encode()).to_bytes(4, "big")).decode()


class RankState(enum.Enum):
    """What a rank does: it RUNS its own code, WAITS in the engine, waits OUTSIDE in torch.distributed, has LOST its
    connections and is about to stop, or is GONE."""

    RUNS = "runs"
    WAITS = "waits"
    OUTSIDE = "outside"
    LOST = "lost"
    GONE = "gone"


@dataclass(frozen=True)
class Post:
    """A rank's state, the operation that it waits for, the digests of its last operations by channel, and in how many
    polls in a row it did not move. `waits_for` describes the operation that it waits for."""

    state: RankState
    at: Place | None = None
    issued: dict[str, Operations] = field(default_factory=dict)
    detail: str = ""
    polls: int = 0
    waits_for: str = ""

    def digest(self, channel: str, number: int) -> str | None:
        """The operation that the rank issued with this number. None if it issued none, or it was too long ago."""
        first, digests = self.issued.get(channel, (0, []))
        return digests[number - first] if first <= number < first + len(digests) else None

    def count(self, channel: str) -> int:
        """How many operations the rank issued in a channel."""
        first, digests = self.issued.get(channel, (0, []))
        return first + len(digests)

    def is_like(self, other: Post) -> bool:
        """Whether both say the same, apart from the number of polls."""
        return (self.state, self.at, self.detail) == (other.state, other.at, other.detail)

    def dump(self) -> str:
        issued = {channel: (first, " ".join(digests)) for channel, (first, digests) in self.issued.items()}
        return f"{self.polls} {json.dumps([self.state.value, self.at, issued, self.detail, self.waits_for])}"

    @staticmethod
    def load(text: bytes) -> Post:
        polls, _, rest = text.partition(b" ")
        return replace(_load(rest), polls=int(polls))


@lru_cache(maxsize=256)  # the posts of ranks that wait for one operation differ in `polls` alone
def _load(text: bytes) -> Post:
    state, at, issued, detail, waits_for = json.loads(text)
    operations = {channel: (first, digests.split()) for channel, (first, digests) in issued.items()}
    return Post(RankState(state), tuple(at) if at else None, operations, detail, waits_for=waits_for)


class Answer(NamedTuple):
    """A rank's last answer to a roll call: the number of that call, where its main thread was, and, if the call asked
    for an operation, its description."""

    number: int
    place: str
    text: str = ""

    @staticmethod
    @lru_cache(maxsize=256)
    def load(text: bytes) -> Answer:
        return Answer(*json.loads(text))


def descriptions(posts: Iterable[Post], answers: Iterable[Answer | None] = ()) -> Mapping[str, str]:
    """The descriptions of operations that ranks have posted or answered, by digest."""
    texts = [post.waits_for for post in posts] + [answer.text for answer in answers if answer is not None]
    return {digest(text): text for text in texts if text}


class Silence:
    """How long each rank has been silent, in seconds during which the listening rank itself was running.

    A rank is silent from the first call on that it did not answer, as this rank heard of the calls. So any rank can
    tell it from one reading of the answers.

    >>> silence = Silence()
    >>> silence.hear(1, now_s=0.0)
    >>> silence.hear(2, now_s=4.0)
    >>> silence.listen([Answer(2, ""), Answer(1, ""), Answer(0, ""), None], now_s=5.0)
    [0.0, 1.0, 5.0, 0.0]
    """

    def __init__(self) -> None:
        self._calls: list[tuple[int, float]] = []

    def hear(self, called: int, now_s: float) -> None:
        """Record the number of the last call."""
        if not self._calls or called > self._calls[-1][0]:
            self._calls = [*self._calls[-_REMEMBERED:], (called, now_s)]

    def listen(self, answers: Sequence[Answer | None], now_s: float) -> list[float]:
        """Seconds of silence. A rank that has not started yet, so that it cannot answer, is not silent."""
        return [now_s - self._since(answer.number, now_s) if answer is not None else 0.0 for answer in answers]

    def _since(self, answered: int, now_s: float) -> float:
        index = bisect_right(self._calls, answered, key=lambda call: call[0])
        return self._calls[index][1] if index < len(self._calls) else now_s
