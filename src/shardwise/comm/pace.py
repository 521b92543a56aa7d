"""How often ranks ask the store, and how much they post: what keeps the load of one store bounded. Pure."""

from __future__ import annotations

from typing import NamedTuple

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
        """Whether a rank that has not moved for `polls` polls is to judge. Others take their turn if it goes on."""
        return (polls // _TURN + rank) % self.stride == 0

    @property
    def retry_s(self) -> float:
        """Seconds between two questions of a rank that is about to stop."""
        return 0.1 * max(1.0, self.stride / 16)

    @property
    def meeting_s(self) -> float:
        """The longest pause of a rank that waits for the others in a meeting."""
        return max(0.05, self.stride / 256)
