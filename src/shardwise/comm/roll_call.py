"""For how long ranks have not answered the roll calls. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.comm.posts import Answer


class Silence:
    """How long each rank has been silent, in seconds during which the listening rank itself was running.

    >>> silence = Silence(2)
    >>> silence.listen(1, [Answer(1, ""), Answer(0, "")], elapsed_s=0.0)
    [0.0, 0.0]
    >>> silence.listen(1, [Answer(1, ""), Answer(0, "")], elapsed_s=2.0)
    [0.0, 2.0]
    >>> silence.listen(2, [Answer(2, ""), Answer(1, "")], elapsed_s=2.0)
    [0.0, 0.0]
    """

    def __init__(self, world_size: int) -> None:
        self._heard: list[int | None] = [None] * world_size
        self._silent_s = [0.0] * world_size

    def listen(self, called: int, answers: Sequence[Answer | None], elapsed_s: float) -> list[float]:
        """Take in the last answers, `elapsed_s` seconds after the last time. A rank that has not started yet, so that
        it cannot answer, is not silent."""
        for rank, answer in enumerate(answers):
            number = answer.number if answer is not None else called
            is_silent = number < called and number == self._heard[rank]
            self._silent_s[rank] = self._silent_s[rank] + elapsed_s if is_silent else 0.0
            self._heard[rank] = number
        return list(self._silent_s)
