"""For how long ranks have not answered the roll calls. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from shardwise.comm.posts import Answer

_REMEMBERED = 1000


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
        """Take in the number of the last call."""
        if not self._calls or called > self._calls[-1][0]:
            self._calls = [*self._calls[-_REMEMBERED:], (called, now_s)]

    def listen(self, answers: Sequence[Answer | None], now_s: float) -> list[float]:
        """Seconds of silence. A rank that has not started yet, so that it cannot answer, is not silent."""
        return [now_s - self._since(answer.number, now_s) if answer is not None else 0.0 for answer in answers]

    def _since(self, answered: int, now_s: float) -> float:
        index = bisect_right(self._calls, answered, key=lambda call: call[0])
        return self._calls[index][1] if index < len(self._calls) else now_s
