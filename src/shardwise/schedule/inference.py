"""Passes that only compute, one after the other: the order of their units, and what stays gathered between them.

Under `zero3` a forward gathers each unit and releases it. Generating text calls the model once for each token, so that
the whole model would be sent once for each token. Within `Engine.inference`, as many units stay gathered as memory
allows (see `choose_kept`). The first unit follows the last: the units that the next pass begins with are gathered while
this one ends.

With one rank, a window of units ahead of the one in use moves along the recorded order. With several, the gathers are
collectives in an agreed order (see `gathers`), and every rank has issued the same ones when a pass ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from inspect import signature
from typing import Any

import torch
from torch import nn

from shardwise.comm import Comm
from shardwise.errors import ConfigError
from shardwise.machine.memory import host_share_bytes
from shardwise.memory.placement import UnitSize, place
from shardwise.schedule.gathers import UNKNOWN, Demand, GatherOrder, GatherOrders, Gathers
from shardwise.schedule.hooks import containers
from shardwise.schedule.order import Prefetch, UnitOrder
from shardwise.unit import Unit
from shardwise.unit.weights import WeightsState

_SHARE = 0.75
"""The part of the free memory that gathered weights may take: caches and activations need the rest."""


class CyclicOrder(UnitOrder):
    """The order in which passes without gradients enter the units. Several ranks agree on it after the first pass."""

    learns_from_evaluation = True

    def __init__(self, units: Sequence[Unit], moving: Collection[Unit], ahead: int) -> None:
        """`moving` are those of the units that are gathered in each pass."""
        self._moving = set(moving)
        super().__init__(units, Prefetch(ahead))

    def record(self, entered: Sequence[Unit]) -> None:
        is_first = not self._recorded
        super().record(entered)
        if is_first:
            self.agree()

    def _following(self, entered: Sequence[Unit], index: int) -> Sequence[Unit]:
        return [unit for unit in (*entered[index + 1 :], *entered[:index]) if unit in self._moving]


class CyclicGatherOrder(GatherOrder):
    """The agreed order of gathers, of which the first `ahead` are issued before the pass begins that they are for."""

    def __init__(self, units: Sequence[Unit], containers: Collection[str], ahead: int) -> None:
        super().__init__("pass", units, containers, units[0].comm)
        self._ahead = ahead

    @property
    def first(self) -> list[Unit]:
        """What the next pass begins with: different units, whose gathers are issued ahead of it."""
        agreed = self._agreed
        count = next((n for n in range(len(agreed)) if agreed[n] in agreed[:n]), len(agreed))
        return agreed[: min(count, self._ahead)]

    def _is_next(self, unit: Unit) -> bool:
        if not self._is_agreed or self._position < len(self._agreed):
            return super()._is_next(unit)
        turn = self._position - len(self._agreed)
        return self.first[turn : turn + 1] == [unit]

    def finish(self, keep: Collection[Unit]) -> bool:
        done = max(0, self._position - len(self._agreed))
        super().finish(self.first[:done])
        for unit in self.first[done:]:
            unit.weights.gather()
        return True


class CyclicGatherOrders(GatherOrders):
    """Gathers in passes that only compute."""

    def __init__(self, units: Sequence[Unit], containers: Collection[str], ahead: int) -> None:
        super().__init__((), containers)
        if units and units[0].comm.is_checked:
            self._orders = {"evaluation": CyclicGatherOrder(units, containers, ahead)}
        self._window: Sequence[Unit] = ()

    def begin(self, name: str, demand: Demand = UNKNOWN) -> None:
        if name != "evaluation":
            raise RuntimeError(
                f"a {name} with gradients inside engine.inference(), where weights are only read: call it after the "
                "`with` block, or evaluate under torch.no_grad()"
            )
        super().begin(name, demand)

    def gather(self, unit: Unit, ahead: Sequence[Unit], recomputes: bool = False) -> None:
        if self._current is None and ahead is not self._window:
            # What was prefetched and is not entered after all would otherwise take memory until its next use.
            for other in self._window:
                if other is not unit and other not in ahead and other.weights.state is WeightsState.GATHERING:
                    other.weights.release()
            self._window = ahead
        super().gather(unit, ahead)

    def finish(self, keep: Collection[Unit] = ()) -> None:
        order = self._current
        super().finish(keep)
        self._kept = {unit.name for unit in order.first} if isinstance(order, CyclicGatherOrder) else set()

    def drop(self) -> None:
        super().drop()
        self._window = ()


class InferenceMode:
    """Between `begin` and `end`, passes only compute, one after the other."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], gathers: Gathers) -> None:
        self._model = model
        self._units = units
        self._gathers = gathers
        self._for_training: tuple[UnitOrder, GatherOrders] | None = None
        self._kept: list[Unit] = []

    def begin(self, keeps: Sequence[Unit], ahead: int) -> None:
        """The units of `keeps` stay gathered; the others are gathered up to `ahead` before their use, across the end of
        a pass. A collective."""
        gathers = self._gathers
        gathers.drop()
        self._kept = [unit for unit in gathers.sharded if unit in keeps]
        for unit in self._kept:
            unit.weights.lock()
        moving = [unit for unit in gathers.sharded if unit not in self._kept]
        self._for_training = gathers.unit_order, gathers.gather_orders
        gathers.unit_order = CyclicOrder(self._units, moving, ahead)
        gathers.gather_orders = CyclicGatherOrders(moving, containers(self._model), ahead)

    @contextlib.contextmanager
    def keeping_gathered(self, comm: Comm, device_bytes: int | None) -> Iterator[None]:
        """Within it, as many units stay gathered as fit `device_bytes`, or three quarters of what is free. A
        collective."""
        room = min(comm.share_object(_free_bytes(comm.device), "the room for gathered weights"))
        self.begin(*choose_kept(self._units, int(room * _SHARE) if device_bytes is None else device_bytes))
        try:
            with torch.no_grad():
                yield
        finally:
            self.end()

    def end(self) -> None:
        """Release what stayed gathered, and what was gathered ahead for a next pass."""
        if self._for_training is not None:
            (self._gathers.unit_order, self._gathers.gather_orders), self._for_training = self._for_training, None
            while self._kept:
                self._kept.pop().weights.unlock()
            self._gathers.release_all()


def generate_together(generate: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> Any:
    """Call a model's `generate` with the option that keeps ranks that are done calling the model until all are done."""
    if world_size > 1 and "synced_gpus" in signature(generate).parameters:
        kwargs = {"synced_gpus": True, **kwargs}
    return generate(*args, **kwargs)


def choose_kept(units: Sequence[Unit], room_bytes: int) -> tuple[list[Unit], int]:
    """The units that stay gathered in `room_bytes`, and how many of the others are gathered ahead."""
    sharded = [unit for unit in units if unit.weights.policy.weights_sharded]
    sizes = [
        UnitSize(unit.name, size := unit.weights.full_bytes, size, max(1, len(unit.spec.runs))) for unit in sharded
    ]
    try:
        found = place(sizes, "host", room_bytes)
    except ConfigError:  # as little as a forward takes
        return [], 0
    return [unit for unit, tier in zip(sharded, found.tiers, strict=True) if tier == "device"], found.ahead


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return host_share_bytes()
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reserved
