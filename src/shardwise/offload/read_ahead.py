"""What comes next, if this step goes as the last one did."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class AccessHistory(Generic[T]):
    """Things that happen in the same order in every step, numbered from the first one on.

    >>> routine = AccessHistory[str]()
    >>> routine.enter("a"), routine.enter("b"), routine.turn()
    (False, False, False)
    >>> routine.predict(), routine.predict(), routine.predict()
    ((2, 'a'), (3, 'b'), None)
    >>> routine.enter("a"), routine.predict()
    (True, (4, 'a'))
    """

    def __init__(self) -> None:
        self._last: list[T] = []
        self._now: list[T] = []
        self._is_kept = False
        self._planned = 0
        self.entered = 0

    def enter(self, item: T) -> bool:
        """It happens; says whether it was predicted."""
        place = len(self._now)
        self._now.append(item)
        self._is_kept = self._is_kept and place < len(self._last) and self._last[place] == item
        was_predicted = self._is_kept and self._planned > self.entered
        self.entered += 1
        self.forget(keep=was_predicted)
        return was_predicted

    def turn(self) -> bool:
        """A step ends; says whether it went as the last one."""
        was_kept = self._is_kept and len(self._now) == len(self._last)
        self._last, self._now = self._now, []
        self._is_kept = bool(self._last)
        self.forget(keep=was_kept)
        return was_kept

    def predict(self) -> tuple[int, T] | None:
        """What happens next after all that was predicted, with its number; nothing beyond one step."""
        if not self._is_kept or self._planned - self.entered >= len(self._last):
            return None
        number, self._planned = self._planned, self._planned + 1
        place = number - self.entered + len(self._now)
        return number, self._last[place % len(self._last)]

    def forget(self, keep: bool = False) -> None:
        """Foretell again from here on, as if nothing had been."""
        self._planned = max(self._planned, self.entered) if keep else self.entered
