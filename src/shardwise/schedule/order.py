"""The order of units: learned from the last forward, it decides what is gathered ahead and what stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.config.sections import Runtime
from shardwise.unit.unit import Unit


@dataclass(frozen=True)
class Ahead:
    """How far gathers run ahead of use: so many units, so many bytes of them, and so many with the one in use."""

    units: int = 1
    ahead_bytes: int | None = None
    gathered_bytes: int | None = None

    @classmethod
    def of(cls, runtime: Runtime) -> Ahead:
        return cls(runtime.prefetch, runtime.prefetch_bytes, runtime.max_gathered_bytes)

    def choose(self, unit: Unit, following: Sequence[Unit]) -> list[Unit]:
        """Those of the `following` units, without repetitions, that are released and may be gathered while `unit`
        computes."""
        chosen: list[Unit] = []
        total = 0
        for other in dict.fromkeys(following):
            if other is unit or not other.weights.policy.weights_sharded:
                continue
            total += other.weights.full_bytes
            if len(chosen) == self.units or not self._allows(total, unit.weights.full_bytes):
                break
            chosen.append(other)
        return chosen

    def _allows(self, ahead: int, current: int) -> bool:
        return (self.ahead_bytes is None or ahead <= self.ahead_bytes) and (
            self.gathered_bytes is None or ahead + current <= self.gathered_bytes
        )


def merged(sequences: Sequence[Sequence[int]]) -> list[int]:
    """One sequence with everything that is in any of them: the first, and what others have besides, each behind what it
    follows there.

    >>> merged([[0, 1, 3], [0, 2, 3, 4]])
    [0, 2, 1, 3, 4]
    """
    whole: list[int] = []
    for sequence in sequences:
        place = 0
        for item in sequence if whole else ():
            if item not in whole:
                whole.insert(place, item)
            place = whole.index(item) + 1
        whole = whole or list(sequence)
    return whole


class Order:
    """The order in which a forward entered the units; at first, that of registration."""

    def __init__(self, units: Sequence[Unit], ahead: Ahead) -> None:
        self._all = list(units)
        self._choice = ahead
        self._entered: list[Unit] = []
        self.forward: list[Unit] = []
        self.last: Unit | None = None
        self.backward: list[Unit] = []
        self._ahead: list[list[Unit]] = []
        self._behind: dict[str, list[Unit]] = {}
        self._stays_from: dict[str, int] = {}
        self.learn(self._all)

    def learn(self, entered: Sequence[Unit]) -> None:
        """Adopt the entries of a forward, in order and with repetitions."""
        if self._entered == list(entered):
            return
        self._entered = list(entered)
        seen = list(dict.fromkeys(entered))
        self.last = seen[-1] if seen else None
        self.forward = seen + [unit for unit in self._all if unit not in seen]
        self.backward = [unit for unit in self._all if unit not in seen] + seen[::-1]
        self._ahead = [self._choice.choose(unit, entered[index + 1 :]) for index, unit in enumerate(entered)]
        first = {unit.name: index for index, unit in reversed(list(enumerate(entered)))}
        self._behind = {unit.name: self._choice.choose(unit, entered[: first[unit.name]][::-1]) for unit in seen}
        last = {unit.name: index for index, unit in enumerate(entered)}
        end = list(entered[-1:])
        self._stays_from = {unit.name: last[unit.name] for unit in end + [u for e in end for u in self.behind(e)]}

    def place(self, unit: Unit, before: int) -> int:
        """Where a unit that is entered stands: at its next place after `before`, or there if it has none."""
        for index in range(before + 1, len(self._entered)):
            if self._entered[index] is unit:
                return index
        return before

    @property
    def staying(self) -> list[Unit]:
        """The units that are not released between forward and backward."""
        return [unit for unit in self._all if unit.name in self._stays_from]

    def ahead(self, index: int) -> Sequence[Unit]:
        """The units to gather while the one entered at `index` computes its forward."""
        if 0 <= index < len(self._ahead):
            return self._ahead[index]
        return ()

    def behind(self, unit: Unit) -> Sequence[Unit]:
        """The units to gather while `unit` computes its backward."""
        return self._behind.get(unit.name, ())

    def is_needed_next(self, unit: Unit, entered: int) -> bool:
        """Whether the backward begins with `unit`, or gathers it ahead at once, and `entered` entries bring no more
        of it: then it is in memory at the peak anyway, and releasing it would only send it once more."""
        return entered > self._stays_from.get(unit.name, entered)
