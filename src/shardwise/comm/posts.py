"""What a rank posts about itself for the other ranks, and the board in the store where it does so."""

from __future__ import annotations

import enum
import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from shardwise.comm.store_link import StoreLink
from shardwise.machine.process import Identity

FAILED = "it ended with"
"""How the detail of a rank that an exception ended begins."""
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


class Answer(NamedTuple):
    """A rank's last answer to a roll call: the number of that call, and where its main thread was."""

    number: int
    place: str


class Board:
    """Keys in the store: each rank's identity, post and answer, the roll calls, the verdict, and the meetings.

    A roll call is a number that any rank may write. Every rank that lives answers it at its next poll.
    """

    def __init__(self, store: Any, rank: int, world_size: int, limit_s: float) -> None:
        # A connection of its own: a connection serves one call at a time, and a call of the user's may block in it.
        self._link = StoreLink(store.clone(), limit_s)
        self._rank = rank
        self._world_size = world_size
        self._calling = threading.Lock()
        self.called = 0
        """The last roll call that this rank knows of, and has answered."""
        identity = json.dumps(asdict(Identity.of_this_process()))
        self._link.run(lambda store: store.set(f"identity/{rank}", identity))
        self.post(Post(RankState.RUNS))
        self._answer("")

    def post(self, post: Post) -> None:
        self._link.run(lambda store: store.set(f"post/{self._rank}", post.dump()))

    def read(self) -> list[Post]:
        """The posts of all ranks. A rank that has not started yet counts as one that runs."""
        return [Post.load(text) if text is not None else Post(RankState.RUNS) for text in self._read("post")]

    def identities(self) -> list[Identity | None]:
        """The processes of all ranks; None for a rank that has not started yet."""
        return [Identity(**json.loads(text)) if text is not None else None for text in self._read("identity")]

    def call_roll(self) -> None:
        """Ask all ranks to answer."""
        with self._calling:
            self.called += 1
            self._link.run(lambda store: store.set(f"call/{self.called}", ""))
            self._answer("")

    def answer_call(self, place: Callable[[], str]) -> bool:
        """Answer if there was a roll call since the last answer; `place` says where the main thread is."""
        with self._calling:
            before = self.called
            while self._link.run(lambda store: store.check([f"call/{self.called + 1}"])):
                self.called += 1
            if self.called > before:
                self._answer(place())
            return self.called > before

    def _answer(self, place: str) -> None:
        answer = json.dumps([self.called, place])
        self._link.run(lambda store: store.set(f"answer/{self._rank}", answer))

    def answers(self) -> list[Answer | None]:
        """The last answer of every rank; None for a rank that has not started yet."""
        return [Answer(*json.loads(text)) if text is not None else None for text in self._read("answer")]

    def verdict(self) -> str | None:
        return self._link.run(lambda store: store.get("verdict").decode() if store.check(["verdict"]) else None)

    def decide(self, text: str) -> str:
        """Write the verdict unless there is one already. Returns the one that stands, the same on all ranks."""
        verdict: bytes = self._link.run(lambda store: store.compare_set("verdict", "", text))
        return verdict.decode()

    def arrive(self, name: str, check: Callable[[], None]) -> None:
        """Enter the meeting `name`. The last rank to enter marks it as complete."""

        def enter(store: Any) -> None:
            if store.add(f"came/{name}", 1) == self._world_size:
                store.set(f"met/{name}", "")
                store.delete_key(f"came/{name}")

        self._link.run(enter, check)

    def has_met(self, name: str, check: Callable[[], None]) -> bool:
        """Whether all ranks have entered the meeting `name`."""
        return bool(self._link.run(lambda store: store.check([f"met/{name}"]), check))

    def close(self) -> None:
        self._link.close()

    def _read(self, kind: str) -> list[bytes | None]:
        """The values of one kind of all ranks."""
        keys = [f"{kind}/{rank}" for rank in range(self._world_size)]

        def read(store: Any) -> list[bytes | None]:
            if store.check(keys):
                return list(store.multi_get(keys))
            return [store.get(key) if store.check([key]) else None for key in keys]

        return self._link.run(read)
