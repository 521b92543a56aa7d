"""What a rank posts about itself for the other ranks, and the board in the store where it does so."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field
from typing import Any

Operations = tuple[int, list[str]]
"""Consecutive operations of one channel: the number of the first, and the descriptions of all."""


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
    """A rank's state, the operation that it waits for, its last operations by channel, and in how many polls in a row
    it did not move."""

    state: RankState
    at: tuple[str, int] | None = None
    issued: dict[str, Operations] = field(default_factory=dict)
    detail: str = ""
    polls: int = 0

    def text(self, channel: str, number: int) -> str | None:
        """The operation that the rank issued with this number. None if it issued none, or no longer remembers it."""
        first, texts = self.issued.get(channel, (0, []))
        return texts[number - first] if first <= number < first + len(texts) else None

    def count(self, channel: str) -> int:
        """How many operations the rank issued in a channel."""
        first, texts = self.issued.get(channel, (0, []))
        return first + len(texts)

    def is_like(self, other: Post) -> bool:
        """Whether both say the same, apart from the number of polls."""
        return (self.state, self.at, self.detail) == (other.state, other.at, other.detail)

    def dump(self) -> str:
        return json.dumps([self.state.value, self.at, self.issued, self.detail, self.polls])

    @classmethod
    def load(cls, text: bytes) -> Post:
        state, at, issued, detail, polls = json.loads(text)
        operations = {channel: (first, texts) for channel, (first, texts) in issued.items()}
        return cls(RankState(state), tuple(at) if at else None, operations, detail, polls)


class Board:
    """Keys in the store: one post for each rank, an alarm that asks for answers, the verdict, and the meetings."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        # A connection of its own: a connection serves one call at a time, and a call of the user's may block in it.
        self._store = store.clone()
        self._rank = rank
        self._world_size = world_size
        self._posts = [f"post/{other}" for other in range(world_size)]
        self._answers = [f"answer/{other}" for other in range(world_size)]
        self.post(Post(RankState.RUNS))

    def post(self, post: Post) -> None:
        self._store.set(self._posts[self._rank], post.dump())

    def read(self) -> list[Post]:
        """The posts of all ranks. A rank that has not started yet counts as one that runs."""
        if self._store.check(self._posts):
            return [Post.load(text) for text in self._store.multi_get(self._posts)]
        there = [self._store.get(key) if self._store.check([key]) else None for key in self._posts]
        return [Post.load(text) if text is not None else Post(RankState.RUNS) for text in there]

    def alarm(self) -> None:
        """Ask all ranks to answer."""
        self._store.set("alarm", "")
        self.answer()

    def answer(self) -> None:
        self._store.set(self._answers[self._rank], "")

    def owes_answer(self) -> bool:
        return bool(self._store.check(["alarm"])) and not self._store.check([self._answers[self._rank]])

    def answered(self) -> list[bool]:
        """Which ranks have answered the alarm."""
        return [bool(self._store.check([key])) for key in self._answers]

    def verdict(self) -> str | None:
        return self._store.get("verdict").decode() if self._store.check(["verdict"]) else None

    def decide(self, text: str) -> str:
        """Write the verdict unless there is one already. Returns the one that stands, the same on all ranks."""
        verdict: bytes = self._store.compare_set("verdict", "", text)
        return verdict.decode()

    def arrive(self, name: str) -> None:
        """Enter the meeting `name`. The last rank to enter marks it as complete."""
        if self._store.add(f"came/{name}", 1) == self._world_size:
            self._store.set(f"met/{name}", "")
            self._store.delete_key(f"came/{name}")

    def has_met(self, name: str) -> bool:
        """Whether all ranks have entered the meeting `name`."""
        return bool(self._store.check([f"met/{name}"]))
