"""Which operation follows the last two, as far as a rank knows from before. Pure.

Where nothing on the wire tells operations apart, a rank issues an operation at once only if it is the one that followed
the last two before; any other is met over (see `agreement`). All ranks have met over the same operations, so each has
the same knowledge, and after the same history only one operation is known on all of them. A rank that does anything
else meets, and issues nothing.

A pass goes from unit to unit. So what followed two operations of some units is expected to follow the same two of the
next units: once the ranks have met over `gather` of the third unit after the second and the first, the fourth follows.
A first pass costs a few meetings, whatever the number of units.
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
    [False, False, False]
    >>> [turns.take("gather", f"gather {unit}, 8 elements", unit) for unit in ("blocks.2", "embed")]
    [True, False]
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._last: dict[str, list[_Step]] = {}
        self._places: dict[str, int] = {}
        self._next: dict[_Turn, _Step] = {}
        self._expected: dict[_Turn, _Step] = {}  # relative to the last unit, where no operation is known

    def name_units(self, names: Sequence[str]) -> None:
        """Number the units, in an order that is the same on all ranks. Their sizes are too."""
        self._numbers = {name: number for number, name in enumerate(names)}

    def take(self, channel: str, text: str, unit: str) -> bool:
        """Go on to an operation; returns whether it was known. If not, it is from now on."""
        place = self._places.get(channel, 0)
        last = self._last.setdefault(channel, [])
        turn, alike = (channel, tuple(last)), (channel, tuple(_relative(step, place) for step in last))
        step = self._step(text, unit)
        following = _relative(step, place)
        is_known = self._next[turn] == step if turn in self._next else self._expected.get(alike) == following
        self._next[turn] = step
        self._expected[alike] = following
        self._last[channel] = [*last[-1:], step]
        if step[1] is not None:
            self._places[channel] = step[1]
        return is_known

    def restart(self, channel: str, text: str) -> None:
        """Something that sends nothing came between."""
        self._last[channel] = [(text, None)]

    def _step(self, text: str, unit: str) -> _Step:
        name = unit.partition(" ")[0]
        number = self._numbers.get(name)
        return (text, None) if number is None else (text.partition(", ")[0].replace(name, "*", 1), number)


def _relative(step: _Step, place: int) -> _Step:
    text, number = step
    return text, None if number is None else number - place
