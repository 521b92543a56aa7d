"""`shardwise.ema`: an exponential moving average of the weights, sharded as the optimizer is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shardwise.engine.engine import Engine
from shardwise.memory import Entry, Kind, Tier
from shardwise.optim.states import state_views
from shardwise.partition.dtensors import cut
from shardwise.unit import Unit
from shardwise.unit.state_view import TensorView


def ema(engine: Engine, decay: float = 0.999) -> Ema:
    """An average of the weights that `engine.step()` updates: average = decay * average + (1 - decay) * weights.

    It is of the fp32 master copy, and each rank holds the average of what it updates: 4Ψ/W bytes where the optimizer is
    sharded. The first update copies the weights, as `torch.optim.swa_utils.AveragedModel` does. Make it before
    `engine.load`: checkpoints hold it.

    >>> import torch, shardwise
    >>> model = torch.nn.Linear(4, 1)
    >>> engine = shardwise.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero3")
    >>> average = shardwise.ema(engine, decay=0.99)
    >>> engine.backward(engine(torch.ones(2, 4)).mean())
    >>> engine.step()
    >>> with average.applied():
    ...     output = engine(torch.ones(2, 4))
    """
    return Ema(engine, decay)


class Ema:
    """The average that `ema` returns."""

    def __init__(self, engine: Engine, decay: float) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay is {decay}: it lies between 0 and 1, mostly near 1, such as 0.999")
        self.decay = decay
        self.updates = 0
        self.key = f"ema{len(engine.averages) or ''}"
        self._engine = engine
        self._units = [unit for unit in engine.units if unit.is_trainable]
        self._averages = [_master(unit).clone() for unit in self._units]
        for unit, average in zip(self._units, self._averages, strict=True):
            self._account(unit, average, average.nbytes)
            unit.averages.append(TensorView(self.key, unit.weights.owned, average))
        engine.averages.append(self)
        engine.register_update_hook(self._update)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Within it, the model has the averaged weights: to evaluate or export, not to train. A collective."""
        with self._engine.paused("the averaged weights are applied: leave `with ema.applied():` first"):
            self._swap()
            try:
                yield
            finally:
                self._swap()

    def full_param(self, name: str) -> torch.Tensor:
        """A parameter's average, whole. A collective."""
        for unit, average in zip(self._units, self._averages, strict=True):
            if name in unit.names:
                return unit.whole(unit.weights.whole(average), name)
        return self._engine.full_param(name)  # what is frozen is its own average

    def state_dict(self) -> dict[str, Any]:
        """Decay, number of updates and every trained parameter's average, whole, on the CPU. A collective."""
        names = [name for unit in self._units for name in unit.names]
        averages = {name: self.full_param(name).cpu() for name in names}
        return {"decay": self.decay, "updates": self.updates, "averages": averages}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` gave, under any placement and number of ranks."""
        averages: Mapping[str, torch.Tensor] = state["averages"]
        names = {name for unit in self._units for name in unit.names}
        if wrong := sorted(names ^ averages.keys()):
            raise ValueError(f"the state is of another model: parameter {wrong[0]!r} is in one and not in the other")
        self.decay, self.updates = state["decay"], state["updates"]
        for unit in self._units:
            (view,) = [view for view in unit.averages if view.key == self.key]
            for slot, param in zip(unit.layout.slots, unit.params, strict=True):
                if part := slot.span.intersect(view.span):
                    flat = cut(param, averages[slot.spec.name]).reshape(-1)
                    view.write(part, flat[part.shift(-slot.span.start).slice])

    @torch.no_grad()
    def _update(self) -> None:
        # One unit after the other: a master on a disk is read into host memory.
        for unit, average in zip(self._units, self._averages, strict=True):
            master = _master(unit)
            self._follow(unit, average, master)
            if self.updates == 0:
                average.copy_(master)
            else:
                average.lerp_(master, 1 - self.decay)
        self.updates += 1

    def _follow(self, unit: Unit, average: torch.Tensor, master: torch.Tensor) -> None:
        """Rest where the master does: a budget may have moved it to the device."""
        if average.device != master.device:
            self._account(unit, average, 0)
            average.data = average.to(master.device)
            self._account(unit, average, average.nbytes)

    def _account(self, unit: Unit, average: torch.Tensor, size_bytes: int) -> None:
        tier = Tier.DEVICE if average.device == self._engine.comm.device else Tier.HOST
        self._engine.account(Entry(Kind.OPTIM, f"{unit.name} ({self.key})", tier), size_bytes)

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchange averages and masters, a unit at a time, and bring the weights up to date."""
        for unit, average in zip(self._units, self._averages, strict=True):
            unit.weights.wait_gather()
            master = state_views(unit, None)[0]
            before = master.read(master.span).clone()
            master.write(master.span, average)
            average.copy_(before)
            unit.weights.refresh()


def _master(unit: Unit) -> torch.Tensor:
    view = state_views(unit, None)[0]
    return view.read(view.span).detach()
