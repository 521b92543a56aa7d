"""Where the weights of each unit rest when a model only computes: on the device, on the host or on the disk.

Units that do not rest on the device travel there in each pass, in the order of their use. In flight are the one in use
and those that are fetched ahead of it: the *window*. What rests on the device, and the window, must fit the budget.

The units that travel are spread evenly over the pass. Their copies then run while the units between them compute; side
by side they would be waited for:

    rests on the device   ■ ■ · ■ ■ · ■ ■ · ■ ■ ·        as many copies as computations in any stretch of the pass
    travels                   ↑     ↑     ↑     ↑

Integers only; `shardwise plan --inference` uses the same functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.config.sections import Tier
from shardwise.errors import ConfigError
from shardwise.sizes import format_bytes

AHEAD = 3
"""The most units that are fetched ahead of the one in use."""
_ENOUGH = 2
"""So many ahead keep the link busy, also while the host chooses the next token. More are worth memory that nothing
else can use, and fewer are for budgets that have no room for three units."""


@dataclass(frozen=True)
class UnitSize:
    """One unit: its bytes on the device, those that a rank keeps of it elsewhere, and its uses in a pass.

    `stays` says that the unit cannot rest elsewhere, because it is in use during the whole pass, or is too small to.
    """

    name: str
    full_bytes: int
    shard_bytes: int
    uses: int = 1
    stays: bool = False


@dataclass(frozen=True)
class WeightPlacement:
    """The tier of each unit, and how many units are fetched ahead."""

    units: tuple[UnitSize, ...]
    tiers: tuple[Tier, ...]
    ahead: int

    def bytes_on(self, tier: Tier) -> int:
        """What rests on a tier, of one rank."""
        each = zip(self.units, self.tiers, strict=True)
        return sum(unit.full_bytes if tier == "device" else unit.shard_bytes for unit, own in each if own == tier)

    @property
    def resident_units(self) -> int:
        return self.tiers.count("device")

    @property
    def window_bytes(self) -> int:
        """The most that the units in flight take on the device."""
        return window_bytes([unit.full_bytes for unit in self._moving()], self.ahead)

    @property
    def device_bytes(self) -> int:
        """The most that weights take on the device."""
        return self.bytes_on("device") + self.window_bytes

    @property
    def fetched_bytes(self) -> int:
        """What a rank fetches from its host and disk in one pass."""
        return sum(unit.shard_bytes * unit.uses for unit in self._moving())

    def _moving(self) -> list[UnitSize]:
        return [unit for unit, tier in zip(self.units, self.tiers, strict=True) if tier != "device"]


def window_bytes(sizes: Sequence[int], ahead: int) -> int:
    """The largest sum of a unit and the `ahead` units after it, where the first follows the last.

    >>> window_bytes([1, 5, 1, 4], ahead=1), window_bytes([1, 5], ahead=3)
    (6, 6)
    """
    count = min(len(sizes), ahead + 1)
    twice = [*sizes, *sizes]
    return max((sum(twice[start : start + count]) for start in range(len(sizes))), default=0)


def spread(count: int, among: int) -> set[int]:
    """`count` of the numbers below `among`, at even distances.

    >>> sorted(spread(3, 9)), sorted(spread(2, 3)), spread(0, 3)
    ([1, 4, 7], [0, 2], set())
    """
    return {(2 * number + 1) * among // (2 * count) for number in range(count)}


def place(
    units: Sequence[UnitSize], away: Tier, device_bytes: int | None, host_bytes: int | None = None
) -> WeightPlacement:
    """Where units, given in the order of their use, rest. As many as fit `device_bytes` rest on the device, all
    of them for None; the others on `away`, and where that is the disk, as many of these as fit `host_bytes` on the
    host. Up to `AHEAD` units are fetched ahead: the number with which the fewest bytes travel.
    """
    if device_bytes is None:
        resident: list[Tier] = ["device"] * len(units)
        return WeightPlacement(tuple(units), tuple(resident), AHEAD)
    for depths in (range(_ENOUGH, AHEAD + 1), *([depth] for depth in range(_ENOUGH - 1, -1, -1))):
        fitting = [found for depth in depths if (found := _fitting(units, away, device_bytes, depth)) is not None]
        if fitting:
            return _cached(min(fitting, key=lambda found: (found.fetched_bytes, -found.ahead)), host_bytes)
    least = _with_moving(units, away, sum(not unit.stays for unit in units), 0)
    assert least is not None
    largest = max(units, key=lambda unit: unit.full_bytes)
    raise ConfigError(
        f"device_memory leaves {format_bytes(max(0, device_bytes))} for weights, and one unit at a time takes "
        f"{format_bytes(least.device_bytes)} ({largest.name} is the largest): raise device_memory, or lower batch "
        "and context, for which memory is set aside"
    )


def _fitting(units: Sequence[UnitSize], away: Tier, device_bytes: int, ahead: int) -> WeightPlacement | None:
    """The placement with the fewest units away from the device that fits `device_bytes`; None if none does."""
    for count in range(len(units) + 1):
        found = _with_moving(units, away, count, ahead)
        if found is not None and found.device_bytes <= device_bytes:
            return found
    return None


def _with_moving(units: Sequence[UnitSize], away: Tier, count: int, ahead: int) -> WeightPlacement | None:
    """The placement with `count` units away from the device; those that a pass uses several times leave last."""
    movable = [number for number, unit in enumerate(units) if not unit.stays]
    if count > len(movable):
        return None
    once = [number for number in movable if units[number].uses == 1]
    often = [number for number in movable if units[number].uses > 1]
    moving = {once[place] for place in spread(min(count, len(once)), len(once))}
    moving |= {often[place] for place in spread(max(0, count - len(once)), len(often))}
    tiers: list[Tier] = [away if number in moving else "device" for number in range(len(units))]
    return WeightPlacement(tuple(units), tuple(tiers), ahead)


def _cached(found: WeightPlacement, host_bytes: int | None) -> WeightPlacement:
    """The same with units on the host instead of the disk, spread evenly, as many as fit `host_bytes`."""
    away = [number for number, tier in enumerate(found.tiers) if tier == "disk"]
    if host_bytes is None or not away:
        return found
    for count in range(len(away) + 1):
        left = {away[place] for place in spread(count, len(away))}
        tiers: list[Tier] = [
            "host" if tier == "disk" and number not in left else tier for number, tier in enumerate(found.tiers)
        ]
        cached = dataclasses.replace(found, tiers=tuple(tiers))
        if cached.bytes_on("host") <= host_bytes:
            return cached
    return found
