"""When units are reduced: once a backward has left them, in the order that all ranks keep.

Autograd runs nodes in the reverse order of their creation. So a backward is done with a unit when it reaches the inputs
of the unit's first use, except where an earlier forward, or something outside of the unit's modules, used it before.

One reduce-scatter is in flight while the next is packed. Where a unit is reduced in the node and then across nodes, the
second is in flight together with the first of the next unit.
"""

from __future__ import annotations

from collections.abc import Callable

from shardwise.profiling import Clock
from shardwise.schedule.autograd import adds_to, adds_to_all, awaits_gradient, current_task, inside_backward
from shardwise.schedule.gathers import Gathers
from shardwise.schedule.graphs import ForwardGraph, ForwardGraphs
from shardwise.unit import Unit


class CompleteUnits:
    """The units that this rank's backward has left, or has no part in.

    The backward inside a re-entrant checkpoint is a task of its own, in which autograd does not tell what the task
    around it brings. So that is asked where the backward begins: units that get gradients there as well are reduced at
    the end.
    """

    def __init__(self, graphs: ForwardGraphs, gathers: Gathers) -> None:
        self._graphs = graphs
        self._gathers = gathers
        self._left: dict[Unit, ForwardGraph] = {}
        self._are_all = False
        self._used_before: list[Unit] = []
        self._outer_task: int | None = None
        self._outer_units: set[Unit] = set()

    def enter(self, units: list[Unit]) -> None:
        """The backward has reached the first module, in the outermost of its tasks."""
        if self._outer_task is None:
            self._outer_task = current_task()
            if self._graphs.are_recomputed:
                self._outer_units = {unit for unit in units if adds_to(unit.params)}

    def forget(self) -> None:
        """The backward is over."""
        self._left = {}
        self._are_all = False
        self._outer_task, self._outer_units = None, set()

    def leave(self, graph: ForwardGraph, unit: Unit) -> bool:
        """The backward has left all uses of a unit in a graph; returns whether that makes the unit complete."""
        if unit in self._left or self._is_awaited(graph, unit):
            return False
        self._left[unit] = graph
        return True

    def end(self) -> None:
        """No more gradients arrive."""
        self._are_all = True

    def has(self, unit: Unit) -> bool:
        """Whether this rank has nothing more to add to a unit's gradients, and its gather, which others may need, is
        over."""
        is_complete = self._are_all or self._is_skipped(unit)
        return unit in self._left or (is_complete and self._gathers.gather_orders.passes(unit))

    def is_to_come(self, unit: Unit) -> bool:
        """Whether the backward has yet to reach a forward that used a unit, or to leave it."""
        return not self._are_all and bool(self._graphs.using(unit, before=self._left.get(unit)))

    def _is_awaited(self, graph: ForwardGraph, unit: Unit) -> bool:
        """Whether a backward that has left a unit in a graph may bring further gradients: from uses before it."""
        earlier = self._graphs.using(unit, before=graph)
        if not earlier:
            return self._is_used_before(unit)
        # The earlier forward has a part in this backward, or it has its own. Autograd cannot tell where gradients are
        # added up on the parameters, and where a re-entrant checkpoint brings them, in a task of its own: there the
        # reduction waits for the end.
        is_added_up = unit.weights.policy.grads_cut == "replicated"
        is_recomputed = any(each.uses[unit].without_grad for each in (*earlier, graph)) or not adds_to_all(unit.params)
        return unit.is_trainable and (is_added_up or is_recomputed or awaits_gradient(unit.params))

    def _is_used_before(self, unit: Unit) -> bool:
        """Whether something outside of the unit's modules used its parameters before they did. Then the unit is
        reduced at the end of the backward, from now on."""
        if unit not in self._used_before and (awaits_gradient(unit.params) or self._is_brought_outside(unit)):
            self._used_before.append(unit)
        return unit in self._used_before

    def _is_brought_outside(self, unit: Unit) -> bool:
        """Whether, in a re-entrant checkpoint, the backward around it brings gradients to a unit."""
        return unit in self._outer_units and current_task() != self._outer_task

    def _is_skipped(self, unit: Unit) -> bool:
        """Whether this rank's backward has no part in a unit."""
        if not unit.comm.is_checked or self._graphs.using(unit):
            return False
        return not (inside_backward() and (adds_to(unit.params) or self._is_brought_outside(unit)))


class ReduceQueue:
    """The units that are still to be reduced, and those in flight. `on_reduced` is called with each."""

    def __init__(self, complete: CompleteUnits, clock: Clock, on_reduced: Callable[[Unit], None]) -> None:
        self._complete = complete
        self._clock = clock
        self._on_reduced = on_reduced
        self._waiting: list[Unit] = []
        self._reduces = False
        self._in_flight: list[Unit] = []

    @property
    def outstanding(self) -> int:
        """How many units wait for their turn."""
        return len(self._waiting)

    def begin(self, waiting: list[Unit], reduces: bool) -> None:
        """These units are due from now on, in this order; unless it `reduces`, they only collect gradients: this rank's
        own, or those of its node."""
        self._waiting, self._reduces = waiting, reduces

    def advance(self) -> None:
        """Reduce what this rank's backward has left, or has no part in, as far as the order allows."""
        while self._waiting and self._complete.has(self._waiting[0]):
            self._reduce(self._waiting.pop(0))

    def reduce_rest(self) -> None:
        """Reduce all that is left, ready or not, and wait for the last."""
        for unit in self._waiting:
            self._reduce(unit)
        self.finish()

    def start(self, unit: Unit, is_final: bool = True) -> None:
        """Start to reduce a unit's gradients, once those before have arrived: the plan counts on two units in flight
        at most."""
        self._finish_one_each()
        unit.grads.start_reduce(is_final)
        self._in_flight.append(unit)
        if not unit.plan.reduce_plan.overlap:
            self.finish()

    def finish(self) -> None:
        """Wait for the units in flight."""
        while self._in_flight:
            self._finish_one_each()

    def _finish_one_each(self) -> None:
        """Wait for one reduce-scatter of each unit in flight."""
        units, self._in_flight = self._in_flight, []
        for unit in units:
            if unit.grads.is_in_flight:
                with self._clock.phase("finish reduce"):
                    if not unit.grads.finish_reduce():
                        self._in_flight.append(unit)
                        continue
            if unit.grads.is_reduced:
                self._on_reduced(unit)

    def forget(self) -> None:
        """The units in flight were abandoned."""
        self._in_flight = []

    def _reduce(self, unit: Unit) -> None:
        if self._reduces or unit.grads.is_cut_by_node:
            self.start(unit, self._reduces)
        else:
            unit.grads.collect()
