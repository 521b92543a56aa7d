"""Which operation follows the last two, as far as a rank knows from before. Pure.

Where nothing on the wire tells operations apart, a rank issues an operation at once only if it is the one that followed
the last two before; any other is met over (see `agreement`). All ranks have met over the same operations, so each has
the same knowledge, and after the same history only one operation is known on all of them. A rank that does anything
else meets, and issues nothing.

A pass goes from unit to unit. So what followed two operations of some units is expected to follow the same two of the
next units. Where nothing is known, it is the same operation of the next unit, or of the one before the last; after
operations that an exchange announced, it is that exchange again. A first pass costs a few meetings, whatever the number
of units. An expectation that fails costs one more.
"""

from __future__ import annotations

from collections.abc import Sequence

_Step = tuple[str, int | None]
"""An operation without the name of its unit, and the number of that unit, or None."""
_Turn = tuple[str, tuple[_Step, ...]]


class Turns:
    """The operations that followed one another, by channel.

    >>> turns = Turns()
    >>> turns.name_units(["embed", "blocks.0", "blocks.1", "blocks.2", "head"])
    >>> [turns.take("gather", f"gather {unit}, 8 elements", unit) for unit in ("embed", "blocks.0", "blocks.1")]
    [False, True, True]
    >>> [turns.take("gather", f"gather {unit}, 8 elements", unit) for unit in ("blocks.2", "embed")]
    [True, False]
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._last: dict[str, list[_Step]] = {}
        self._places: dict[str, int] = {}
        self._next: dict[_Turn, _Step] = {}
        self._announcer: dict[str, _Step | None] = {}  # what announced the last operation of the channel
        self._next_alike: dict[_Turn, _Step] = {}  # relative to the last unit

    def name_units(self, names: Sequence[str]) -> None:
        """Number the units, in an order that is the same on all ranks. Their sizes are too."""
        self._numbers = {name: number for number, name in enumerate(names)}

    def take(self, channel: str, text: str, unit: str, is_announced: bool = False) -> bool:
        """Go on to an operation; returns whether all ranks expect it: as what followed before, or because what the
        operation before sent to all ranks announced it."""
        place, last, step = self._places.get(channel, 0), self._last.get(channel, []), self._step(text, unit)
        turn, alike = (channel, tuple(last)), (channel, tuple(_moved(each, -place) for each in last))
        is_expected = is_announced or self._expect(turn, alike, place) == step
        self._next[turn] = step
        self._next_alike[alike] = _moved(step, -place)
        self._last[channel] = [*last[-1:], step]
        if step[1] is not None:
            self._places[channel] = step[1]
        if not is_announced:
            self._announcer[channel] = None
        elif self._announcer.get(channel) is None and last:
            self._announcer[channel] = last[-1]
        return is_expected

    def _expect(self, turn: _Turn, alike: _Turn, place: int) -> _Step | None:
        if turn in self._next:
            return self._next[turn]
        if alike in self._next_alike:
            return _moved(self._next_alike[alike], place)
        if (announcer := self._announcer.get(turn[0])) is not None:
            return announcer
        text, number = turn[1][-1] if turn[1] else ("", None)
        return None if number is None else (text, number + (1 if number < len(self._numbers) - 1 else -1))

    def restart(self, channel: str, text: str) -> None:
        """An event that sends nothing, such as a broken pass, interrupts the sequence."""
        self._last[channel], self._announcer[channel] = [(text, None)], None

    def _step(self, text: str, unit: str) -> _Step:
        name = unit.partition(" ")[0]
        number = self._numbers.get(name)
        return (text, None) if number is None else (text.partition(", ")[0].replace(name, "*", 1), number)


def _moved(step: _Step, by: int) -> _Step:
    text, number = step
    return text, None if number is None else number + by
