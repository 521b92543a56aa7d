"""When units are gathered, released and reduced: what a model's hooks and its backwards have in common.

    forward     the hooks on modules: gather before use, release after, count uses
    backward    gather again, open gradients, reduce when a unit is left (`reduce_queue`)
    gathers     which gathers are issued, in the order that all ranks keep (`order`)
    inference   another order, for passes that only compute

The order in which units are entered is recorded in a forward, and agreed on by all ranks; it decides what is prefetched
and the order of the reduce-scatters. Gathers keep one order on all ranks too, even where ranks enter different units.
`graphs` records what each forward used, for its backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwise.profiling import Clock
from shardwise.schedule.autograd import SavedTensorGuard
from shardwise.schedule.backward import BackwardPass, ScheduleEvents
from shardwise.schedule.forward import ForwardHooks
from shardwise.schedule.gathers import Gathers
from shardwise.schedule.graphs import ForwardGraphs
from shardwise.schedule.hooks import RunningModules, hooked_modules
from shardwise.schedule.inference import InferenceMode
from shardwise.schedule.order import Prefetch
from shardwise.unit import Unit


class Schedule:
    """Drives the units of one model."""

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], prefetch: Prefetch, clock: Clock, events: ScheduleEvents
    ) -> None:
        running = RunningModules(hooked_modules(model, units))
        graphs = ForwardGraphs()
        self.gathers = Gathers(model, units, prefetch, clock)
        self.inference = InferenceMode(model, units, self.gathers)
        self.saved_tensors = SavedTensorGuard(units, self.gathers.gather)
        self.backward = BackwardPass(units, running, self.gathers, graphs, self.saved_tensors, clock, events)
        self.forward = ForwardHooks(model, running, self.gathers, graphs, self.backward, events.last_unit)

    def remove(self) -> None:
        """Take the hooks off the model."""
        self.gathers.unlock_all()
        self.forward.remove()
