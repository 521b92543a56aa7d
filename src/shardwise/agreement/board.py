"""The board in the store on which ranks post what they do.

Whatever is new for all ranks, a roll call or a verdict, is announced under the next number. So a rank that has nothing
to say asks the store one question a poll: whether the next number is there. `Pace` bounds how often ranks ask and how
much they post: one store serves all of them, one at a time.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

from shardwise.agreement.posts import Answer, Place, Post, RankState
from shardwise.agreement.store_link import StoreLink
from shardwise.machine.process import Identity

WITNESSES = 2
"""How many ranks of a host check whether the processes of the others there live."""
JUDGES = 8
"""About how many ranks read the posts of all ranks at a time, however many wait: the store serves one at a time."""
_FULL_RATE = 256  # ranks that may ask at every poll
_SLOWEST = 4  # polls between two questions, so that an error comes within 10 s
_POSTED, _POSTED_BY_ALL = 256, 1 << 15  # operations in a post, and in all posts
_TURN = 10  # polls in a row in which the same ranks judge
_PATIENCE = 3  # polls


class Pace(NamedTuple):
    """A rank looks at its own state every `poll_s`, and asks the store every `ask_s`. A post has `window` operations of
    each channel. One of `stride` ranks judges. After `patience` polls every rank that lives has posted or answered.

    >>> Pace.of(8, 0.5)
    Pace(poll_s=0.5, ask_s=0.5, window=256, stride=1, patience=3)
    >>> Pace.of(1024, 0.5)
    Pace(poll_s=0.5, ask_s=2.0, window=32, stride=128, patience=6)
    """

    poll_s: float
    ask_s: float
    window: int
    stride: int
    patience: int

    @classmethod
    def of(cls, world_size: int, poll_s: float) -> Pace:
        polls = min(_SLOWEST, max(1, world_size // _FULL_RATE))
        window = max(16, min(_POSTED, _POSTED_BY_ALL // world_size))
        return cls(poll_s, polls * poll_s, window, max(1, world_size // JUDGES), _PATIENCE + polls - 1)

    def is_judge(self, rank: int, polls: int) -> bool:
        """Whether a rank that has not moved for `polls` polls is to judge; the others follow if the wait goes on."""
        return (polls // _TURN + rank) % self.stride == 0

    @property
    def retry_s(self) -> float:
        """Seconds between two questions of a rank that is about to stop."""
        return 0.1 * max(1.0, self.stride / 16)

    @property
    def meeting_s(self) -> float:
        """The longest pause of a rank that waits for the others in a meeting."""
        return max(0.05, self.stride / 256)


class Board:
    """Keys in the store: each rank's identity, post and answer, the news, the verdict, and the meetings.

    `describe` says of a place what operation this rank issued there, for roll calls that ask.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, limit_s: float, describe: Callable[[Place], str] = lambda _: ""
    ) -> None:
        self._link = StoreLink(store, limit_s)
        self._rank = rank
        self._world_size = world_size
        self._describe = describe
        self._calling = threading.Lock()
        self._has_unread = False
        self._asked: Place | None = None
        self._started: dict[str, set[str]] = {}
        self._identities: list[Identity | None] = []
        self.called = 0
        """The number of the last news that this rank knows of. It has answered it."""
        self.identity = Identity.of_this_process()
        self._host = f"hosts/{self.identity.view}/{self.identity.host}"
        with self._link.starting():
            self.is_witness = self._enter() <= WITNESSES
            self.post(Post(RankState.RUNS))
            self.hear(lambda: "")  # a rank that starts late has not been silent before
            self._answer("")

    def _enter(self) -> int:
        """Write down who this rank is; its number among those of its host."""
        text = json.dumps(asdict(self.identity))

        def write(store: Any) -> int:
            store.set(f"identity/{self._rank}", text)
            number = int(store.add(self._host, 1))
            store.set(f"{self._host}/{number}", f"{self._rank} {text}")
            return number

        return self._link.run(write)

    def post(self, post: Post) -> None:
        self._link.run(lambda store: store.set(f"post/{self._rank}", post.dump()))

    def read(self) -> list[Post]:
        """The posts of all ranks. A rank that has not started yet counts as one that runs."""
        return [Post.load(text) if text is not None else Post(RankState.RUNS) for text in self._read("post")]

    def identities(self) -> list[Identity | None]:
        """The processes of all ranks; None for a rank that has not started yet."""
        if None in self._identities or not self._identities:
            found = self._read("identity")
            self._identities = [Identity(**json.loads(text)) if text is not None else None for text in found]
        return self._identities

    def neighbours(self) -> dict[int, Identity]:
        """The processes of the other ranks on this host that have started."""

        def read(store: Any) -> list[bytes]:
            keys = [f"{self._host}/{number}" for number in range(1, store.add(self._host, 0) + 1)]
            return list(store.multi_get(_present(store, keys)))

        found = (text.decode().partition(" ") for text in self._link.run(read))
        identities = {int(rank): Identity(**json.loads(text)) for rank, _, text in found}
        return {rank: each for rank, each in identities.items() if rank != self._rank}

    # News

    def hear(self, place: Callable[[], str]) -> bool:
        """Whether there was news since the last time. If so, answer it: `place` says where the main thread is."""
        with self._calling:
            has_news = self._catch_up() or self._has_unread
            self._has_unread = False
            if has_news:
                self._answer(place())
            return has_news

    def call_roll(self, asked: Place | None = None) -> None:
        """Ask all ranks to answer, with the operation `asked` if there is one."""
        with self._calling:
            # Simultaneous calls of several ranks are one, unless one asks for something else. If the number announces a
            # verdict, the next `hear` finds it.
            while self._announce(asked) != asked and asked is not None:
                pass
            self._asked = asked or self._asked
            self._answer("")

    def _announce(self, asked: Place | None) -> Place | None:
        """Announce a call under the next number; returns for what the call with this number asks."""
        self.called += 1
        self._has_unread = True
        text = json.dumps(asked)
        return _place(self._link.run(lambda store: store.compare_set(f"news/{self.called}", "", text)))

    def _catch_up(self) -> bool:
        """Read the news; whether there were any."""
        before = self.called
        while self._link.run(lambda store: store.check([f"news/{self.called + 1}"])):
            self.called += 1
            self._asked = _place(self._link.run(lambda store: store.get(f"news/{self.called}"))) or self._asked
        return self.called > before

    def _answer(self, place: str) -> None:
        """Answer the last call, with the operation that was asked for last: a call without a question may follow one
        with it, before its answer is read."""
        answer = json.dumps([self.called, place, self._describe(self._asked) if self._asked else ""])
        self._link.run(lambda store: store.set(f"answer/{self._rank}", answer))

    def answers(self) -> list[Answer | None]:
        """The last answer of every rank; None for a rank that has not started yet."""
        return [Answer.load(text) if text is not None else None for text in self._read("answer")]

    def verdict(self) -> str | None:
        return self._link.run(lambda store: store.get("verdict").decode() if store.check(["verdict"]) else None)

    def decide(self, text: str) -> str:
        """Write the verdict unless there is one already. Returns the one that stands, the same on all ranks."""
        verdict: bytes = self._link.run(lambda store: store.compare_set("verdict", "", text))
        with self._calling:
            # A number that is new to every rank: a rank that sees it reads the verdict, which is written already.
            self._catch_up()
            self._has_unread = True
            self._link.run(lambda store: store.compare_set(f"news/{self.called + 1}", "", json.dumps(None)))
        return verdict.decode()

    def enlist(self, name: str) -> int:
        """How many ranks have enlisted for `name`, with this one."""
        return int(self._link.run(lambda store: store.add(f"enlisted/{name}", 1)))

    # Meetings

    def arrive(self, name: str, check: Callable[[], None]) -> int:
        """Enter the meeting `name`; returns how many ranks it still waits for."""

        def enter(store: Any) -> int:
            missing = self._world_size - int(store.add(f"came/{name}", 1))
            if not missing:
                store.set(f"met/{name}", "")
                store.delete_key(f"came/{name}")
            return missing

        return self._link.run(enter, check)

    def has_met(self, name: str, check: Callable[[], None]) -> bool:
        """Whether all ranks have entered the meeting `name`."""
        return bool(self._link.run(lambda store: store.check([f"met/{name}"]), check))

    def close(self) -> None:
        self._link.close()

    def _read(self, kind: str) -> list[bytes | None]:
        """The values of one kind of all ranks. A value that is there stays there."""
        keys = [f"{kind}/{rank}" for rank in range(self._world_size)]
        started = self._started.setdefault(kind, set())

        def read(store: Any) -> list[bytes | None]:
            started.update(_present(store, [key for key in keys if key not in started]))
            wanted = [key for key in keys if key in started]
            values = dict(zip(wanted, store.multi_get(wanted) if wanted else (), strict=True))
            return [values.get(key) for key in keys]

        return self._link.run(read)


def _place(text: bytes) -> Place | None:
    """The operation that a roll call asks about."""
    asked = json.loads(text)
    return tuple(asked) if asked else None


def _present(store: Any, keys: list[str]) -> list[str]:
    """The keys that the store has, found in few questions if nearly all or nearly none are there."""
    if not keys or store.check(keys):
        return keys
    half = len(keys) // 2
    return _present(store, keys[:half]) + _present(store, keys[half:]) if half else []
