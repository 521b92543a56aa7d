"""A backward: units are gathered again as it reaches them, and reduced as it leaves them.

It begins with `engine.backward`, or with the first hook that a plain `loss.backward()` runs into. A hook on each output
of a module gathers its units and opens their gradients; a hook on its inputs tells when the backward has left them (see
`forward`, which sets them). Units are then reduced, in the order that all ranks keep (see `reduce_queue`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from shardwise.profiling import Clock
from shardwise.schedule.autograd import BackwardEndCallback, SavedTensorGuard, inside_backward, leaves_gradients_on
from shardwise.schedule.gathers import Demand, Gathers
from shardwise.schedule.graphs import ForwardGraph, ForwardGraphs
from shardwise.schedule.hooks import RunningModules
from shardwise.schedule.reduce_queue import CompleteUnits, ReduceQueue
from shardwise.unit import Unit


class Phase(enum.Enum):
    """Which backward the schedule is in.

        IDLE ──begin──▶ BACKWARD ──end──▶ IDLE
          │                 ▲
          │                 └────begin────┐
          └──torch.autograd.grad──▶ AUTOGRAD_GRAD ──its end──▶ IDLE

    BACKWARD leaves gradients on parameters, AUTOGRAD_GRAD does not. `rest` leads from anywhere to IDLE.
    """

    IDLE = "idle"
    BACKWARD = "backward"
    AUTOGRAD_GRAD = "torch.autograd.grad"


_NEXT = {
    Phase.IDLE: {Phase.BACKWARD, Phase.AUTOGRAD_GRAD},
    Phase.BACKWARD: {Phase.IDLE},
    Phase.AUTOGRAD_GRAD: {Phase.BACKWARD, Phase.IDLE},
}


class PhaseMachine:
    """The current phase, and the call with which autograd ends it, if the user started the backward."""

    def __init__(self) -> None:
        self.current = Phase.IDLE
        self._end_callback: BackwardEndCallback | None = None

    def enter(self, phase: Phase) -> None:
        """The one place where the phase changes."""
        if phase is not self.current and phase not in _NEXT[self.current]:
            raise RuntimeError(f"a {phase.value} cannot begin inside a {self.current.value}")
        self.current = phase
        self._end_callback = None

    def end_with_backward(self, call: Callable[[], None]) -> None:
        """Call `call`, which ends the phase, at the end of the backward that autograd is running."""
        self._end_callback = BackwardEndCallback(call)

    @property
    def is_stale(self) -> bool:
        """Whether an exception ended a BACKWARD without a call of the schedule."""
        return self.current is Phase.BACKWARD and not inside_backward()

    @property
    def was_dropped(self) -> bool:
        """Whether an exception ended the backward at whose end autograd would have ended the phase."""
        return self._end_callback is not None and not self._end_callback.is_pending()


@dataclass(frozen=True)
class ScheduleEvents:
    """Callbacks of a schedule to its owner.

    begins                a backward that leaves gradients begins; may raise
    reduces               whether it reduces them
    reduced               a unit's gradients are reduced
    check_plain_backward  the user calls `loss.backward()` instead of the engine's; may raise
    broken_backward       an exception ended a backward, and no call told the schedule
    ended                 a backward has ended, and its gradients are where they rest
    last_unit             the forward enters the last unit
    """

    begins: Callable[[], None]
    reduces: Callable[[], bool]
    reduced: Callable[[Unit], None]
    check_plain_backward: Callable[[], None]
    broken_backward: Callable[[], None]
    ended: Callable[[], None]
    last_unit: Callable[[], None]


class BackwardPass:
    """What a backward does to the units of one model, one backward after the other."""

    def __init__(
        self,
        units: Sequence[Unit],
        running: RunningModules,
        gathers: Gathers,
        graphs: ForwardGraphs,
        saved_tensors: SavedTensorGuard,
        clock: Clock,
        events: ScheduleEvents,
    ) -> None:
        self._units = units
        self._trainable = [unit for unit in units if unit.is_trainable]
        self._is_cut_by_node = any(unit.grads.is_cut_by_node for unit in self._trainable)
        self._running = running
        self._gathers = gathers
        self._graphs = graphs
        self._events = events
        self._phase = PhaseMachine()
        self._complete = CompleteUnits(graphs, gathers)
        self._reduces = ReduceQueue(self._complete, clock, events.reduced)
        self._saved_tensors = saved_tensors

    def begin(self) -> None:
        """From here to `end`, gradients arrive."""
        if self._phase.current is Phase.BACKWARD:
            return
        self._events.begins()
        self._phase.enter(Phase.BACKWARD)
        self._finish_updates()  # a pending update reads the last step's gradients, whose memory this backward fills
        reduces = self._events.reduces()
        if reduces or self._is_cut_by_node:
            self._gathers.unit_order.agree()
        self._gathers.gather_orders.begin("backward", Demand(self._complete.is_to_come, self._reduces.advance))
        self._reduces.begin(self._in_order(), reduces)

    def end(self) -> None:
        """Finish what the backward left open: units that no use reached are reduced as zeros; all weights rest."""
        if self._phase.current is not Phase.BACKWARD:
            return
        self._complete.end()
        self._reduces.advance()
        self._gathers.gather_orders.finish()
        self._reduces.reduce_rest()
        self.rest()
        self._saved_tensors.end()
        self._check_late()
        self._events.ended()

    def add_gradients(self, grads: Mapping[str, torch.Tensor]) -> None:
        """Add gradients that were computed outside of a backward, by parameter, as if a backward had left them."""
        self._events.begins()
        self._finish_updates()
        for unit in self._trainable:
            if not grads.keys().isdisjoint(unit.names):
                unit.grads.add([grads.get(name) for name in unit.names])
        reduces = self._events.reduces()
        if reduces:
            self._gathers.unit_order.agree()
        self._reduces.begin(self._in_order(), reduces)
        self._reduces.reduce_rest()
        self._reduces.begin([], reduces=False)
        self._saved_tensors.end()
        self._events.ended()

    def reduce_all(self) -> None:
        """Reduce every unit now: for gradients that were left to `step()`."""
        left = {unit for unit in self._trainable if not unit.grads.is_reduced}
        if left:
            self._gathers.unit_order.agree()
            for unit in self._in_order():
                if unit in left:
                    self._reduces.start(unit)
        self._reduces.finish()

    def reduced_part(self) -> float:
        """How much of the trainable units this backward has left, from 0 to 1."""
        return 1.0 - self._reduces.outstanding / len(self._trainable)

    @property
    def is_stale(self) -> bool:
        """Whether an exception ended the backward without a call of `end`."""
        return self._phase.is_stale

    def rest(self) -> None:
        """Between passes: sharded weights are released and no module is running."""
        self._gathers.drop()
        self._running.forget()
        self._phase.enter(Phase.IDLE)
        self._reduces.begin([], reduces=False)
        self._complete.forget()
        self._graphs.end_backward()
        self._graphs.begin()

    def abandon(self) -> None:
        """Wait for what is in flight, drop the gradients of this step, and rest."""
        self._gathers.unlock_all()
        self._finish_updates()  # the last step's update may still have to read the gradients
        for unit in self._trainable:
            unit.grads.clear()
        self._reduces.forget()
        self.rest()

    def drop_gradients(self) -> None:
        """Drop the gradients of this step. Outside of a backward, forwards before it can still have theirs."""
        if self._phase.current is not Phase.IDLE:
            self.abandon()
        elif any(unit.grads.has_gradients for unit in self._trainable):
            self._finish_updates()
            for unit in self._trainable:
                unit.grads.clear()
        else:
            for unit in self._trainable:
                unit.grads.drop_local()

    def forget_broken(self) -> None:
        """Forget a backward that an exception ended without a call of `end`."""
        phase = self._phase
        if phase.current is Phase.BACKWARD and (phase.was_dropped or phase.is_stale):
            self._events.broken_backward()
        elif phase.current is Phase.AUTOGRAD_GRAD and phase.was_dropped:
            self._end_autograd_grad()

    # Hooks on tensors

    def reach(self, graph: ForwardGraph, units: Sequence[Unit], generations: Sequence[int]) -> None:
        """The backward reaches a module: its units' weights are needed, and their gradients will arrive."""
        self._begin_plain()
        if self._phase.current is Phase.BACKWARD:
            self._complete.enter(self._trainable)
        self._graphs.reach(graph)
        for unit, generation in zip(units, generations, strict=True):
            if unit.weights.generation != generation:
                raise RuntimeError(
                    f"the weights of {unit.name} were changed between this forward and its backward, so its "
                    "gradients would be wrong: call engine.step() only after the backward of every forward"
                )
            self._gather(unit)
            if torch.is_grad_enabled():
                self._gathers.lock(unit)  # for the backward through the graph that this one makes, wherever it begins
            if unit.is_trainable and self._phase.current is Phase.BACKWARD:
                unit.grads.open()

    def recompute(self, units: Sequence[Unit]) -> None:
        """A module runs again, in a checkpoint."""
        for unit in units:
            self._gather(unit, recomputes=True)

    def gather(self, unit: Unit) -> None:
        """The backward needs a unit where it has reached no module, or recomputes."""
        if self._phase.current is not Phase.IDLE:
            self._gather(unit, recomputes=True)
        else:  # it may reach none at all, and nothing else would release the unit
            self._gathers.gather(unit)
            BackwardEndCallback(partial(self._release_unused, [unit]))

    def _gather(self, unit: Unit, recomputes: bool = False) -> None:
        self._reduces.advance()  # before they take part in this gather, other ranks may wait for what is skipped here
        self._gathers.gather(unit, self._gathers.unit_order.before(unit), recomputes)

    def leave(self, graph: ForwardGraph, closing: Sequence[Unit]) -> None:
        """The backward has left the units' first use with gradients."""
        if self._phase.current is Phase.AUTOGRAD_GRAD:
            self._release_unused(closing)
        if self._phase.current is not Phase.BACKWARD:  # IDLE: a backward inside the forward of the module
            return
        for unit in closing:
            if graph.uses[unit].without_grad == 0:
                self._leave_unit(graph, unit)

    def leave_recompute(self, graph: ForwardGraph, closing: Sequence[Unit]) -> None:
        """The backward has left a recomputation of the units."""
        if self._phase.current is not Phase.BACKWARD:
            return
        for unit in closing:
            uses = graph.uses[unit]
            uses.recomputed += 1
            if uses.with_grad == 0 and uses.recomputed == uses.without_grad:
                self._leave_unit(graph, unit)

    def _leave_unit(self, graph: ForwardGraph, unit: Unit) -> None:
        if self._complete.leave(graph, unit):
            if unit.weights.policy.weights_sharded:
                unit.weights.release()
            self._reduces.advance()

    def _begin_plain(self) -> None:
        """Begin a phase if the user started this backward: by whether it leaves gradients on parameters."""
        if self._phase.was_dropped:
            self.forget_broken()
        if self._phase.current is not Phase.IDLE:
            return
        if leaves_gradients_on(param for unit in self._trainable for param in unit.params):
            self._events.check_plain_backward()
            self.begin()
            self._phase.end_with_backward(self.end)
        else:
            self._phase.enter(Phase.AUTOGRAD_GRAD)
            self._phase.end_with_backward(self._end_autograd_grad)

    def _end_autograd_grad(self) -> None:
        if self._phase.current is Phase.AUTOGRAD_GRAD:
            self._phase.enter(Phase.IDLE)
            self._graphs.end_backward(spends=False)
            self._release_unused(self._units)

    def _release_unused(self, units: Sequence[Unit]) -> None:
        """Release what no running module uses."""
        used = self._running.units()
        for unit in units:
            if unit.weights.policy.weights_sharded and unit not in used:
                unit.weights.release()

    def _in_order(self) -> list[Unit]:
        """The trainable units in the order of their reduction."""
        return [unit for unit in self._gathers.unit_order.backward if unit.is_trainable]

    def _finish_updates(self) -> None:
        for unit in self._units:
            if unit.states.is_offloaded:
                unit.finish_update()

    def _check_late(self) -> None:
        late = [unit.name for unit in self._trainable if unit.grads.late_gradient()]
        if late:
            self.abandon()
            raise RuntimeError(
                f"gradients of {', '.join(late)} arrived after the backward had left the unit, so they are in no "
                "rank's sum, and this step's gradients were dropped: compute penalties on parameters after the "
                "forward, not before it, and call backward for each forward before the next one"
            )
