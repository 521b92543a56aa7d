"""What a rank tells the others about itself, and the board in the store where it does so."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field
from typing import Any

Operations = tuple[int, list[str]]
"""Consecutive operations of one stream, and the number of the first."""


class State(enum.Enum):
    """What a rank does: RUNS its own code, WAITS in the engine, waits OUTSIDE in torch.distributed; LOST its
    connections and is about to stop; is GONE."""

    RUNS = "runs"
    WAITS = "waits"
    OUTSIDE = "outside"
    LOST = "lost"
    GONE = "gone"


@dataclass(frozen=True)
class Post:
    """A rank's state, the operation it waits for, what it issued of late, and in how many looks in a row it did not
    move."""

    state: State
    at: tuple[str, int] | None = None
    issued: dict[str, Operations] = field(default_factory=dict)
    detail: str = ""
    looks: int = 0

    def text(self, stream: str, number: int) -> str | None:
        """What the rank issued under a number; None if nothing, or nothing that it still remembers."""
        first, texts = self.issued.get(stream, (0, []))
        return texts[number - first] if first <= number < first + len(texts) else None

    def count(self, stream: str) -> int:
        """How many operations the rank issued in a stream."""
        first, texts = self.issued.get(stream, (0, []))
        return first + len(texts)

    def is_like(self, other: Post) -> bool:
        """Whether it tells the same, however often looked at."""
        return (self.state, self.at, self.detail) == (other.state, other.at, other.detail)

    def dump(self) -> str:
        return json.dumps([self.state.value, self.at, self.issued, self.detail, self.looks])

    @classmethod
    def load(cls, text: bytes) -> Post:
        state, at, issued, detail, looks = json.loads(text)
        operations = {stream: (first, texts) for stream, (first, texts) in issued.items()}
        return cls(State(state), tuple(at) if at else None, operations, detail, looks)


class Board:
    """Keys in the store: a post of each rank, an alarm that asks for answers, the verdict, and the meetings."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        # A connection of its own: a call that waits in another would hold this one up.
        self._store = store.clone()
        self._rank = rank
        self._world_size = world_size
        self._posts = [f"post/{other}" for other in range(world_size)]
        self._answers = [f"answer/{other}" for other in range(world_size)]
        self.post(Post(State.RUNS))

    def post(self, post: Post) -> None:
        self._store.set(self._posts[self._rank], post.dump())

    def read(self) -> list[Post]:
        """The posts of all ranks. Those that have not started yet run."""
        if self._store.check(self._posts):
            return [Post.load(text) for text in self._store.multi_get(self._posts)]
        there = [self._store.get(key) if self._store.check([key]) else None for key in self._posts]
        return [Post.load(text) if text is not None else Post(State.RUNS) for text in there]

    def alarm(self) -> None:
        """Ask everyone to answer."""
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
        """Write the verdict, unless there is one; the one that counts."""
        verdict: bytes = self._store.compare_set("verdict", "", text)
        return verdict.decode()

    def arrive(self, name: str) -> None:
        """Come to the meeting called `name`."""
        if self._store.add(f"came/{name}", 1) == self._world_size:
            self._store.set(f"met/{name}", "")
            self._store.delete_key(f"came/{name}")

    def has_met(self, name: str) -> bool:
        return bool(self._store.check([f"met/{name}"]))
