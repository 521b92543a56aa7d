"""When units are gathered, released and reduced: the hooks on their modules, and the order they record.

Forward: a unit is gathered before the first of its modules runs, while the next units are prefetched, and released
after the last. Backward: a hook on each output gathers the unit again and opens its gradients; a hook on the inputs
tells when the backward has left it. Autograd runs nodes in the reverse order of their creation, so when it reaches the
inputs of a unit's first use, everything that came after is done.

The order in which units are entered is recorded in a forward, and agreed on by all ranks; it decides what is prefetched
and the order of the reduce-scatters. Gathers keep one order on all ranks too, whichever units a rank enters (see
`order`).

A parameter may also be used by a module that does not hold it. Released parameters notice (see `param_guard`): the unit
is then gathered at once and borrowed by the innermost hooked module that is running, until that returns.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.profiling import Clock
from shardwise.schedule.autograd import (
    BackwardEndCallback,
    OncePerBackward,
    SavedTensorGuard,
    adds_to,
    adds_to_all,
    awaits_gradient,
    inside_backward,
    leaves_gradients_on,
    mark_inputs,
    refuse_transforms,
)
from shardwise.schedule.cycle import CyclicGatherOrders, CyclicOrder
from shardwise.schedule.graphs import ForwardGraph, ForwardGraphs
from shardwise.schedule.hooks import HookedModule, containers, hooked_modules, ours
from shardwise.schedule.order import GatherOrders, Order, Prefetch
from shardwise.schedule.reduce_queue import ReduceQueue
from shardwise.tensors import kept_by, outputs_in
from shardwise.unit import Unit
from shardwise.unit.weights import WeightsState


class Phase(enum.Enum):
    """What backward the schedule is in.

        IDLE ──begin_backward──▶ BACKWARD ──end_backward──▶ IDLE
          │                         ▲
          │                         └──begin_backward──┐
          └──torch.autograd.grad──▶ AUTOGRAD_GRAD ─────┴──its end──▶ IDLE

    BACKWARD leaves gradients on parameters, AUTOGRAD_GRAD does not. `rest` leads from anywhere to IDLE.
    """

    IDLE = "idle"
    BACKWARD = "backward"
    AUTOGRAD_GRAD = "torch.autograd.grad"


_IDLE, _BACKWARD, _AUTOGRAD_GRAD = Phase
_NEXT = {_IDLE: {_BACKWARD, _AUTOGRAD_GRAD}, _BACKWARD: {_IDLE}, _AUTOGRAD_GRAD: {_BACKWARD, _IDLE}}


@dataclass(frozen=True)
class ScheduleEvents:
    """What a schedule asks its owner, and tells it.

    begins                a backward that leaves gradients begins; may raise
    reduces               whether it reduces them
    reduced               a unit's gradients are reduced
    check_plain_backward  the user calls `loss.backward()` instead of the engine's; may raise
    broken_backward       an exception ended a backward without word to the schedule
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


class Schedule:
    """Drives the units of one model."""

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], prefetch: Prefetch, clock: Clock, events: ScheduleEvents
    ) -> None:
        self.units = list(units)
        self.phase = Phase.IDLE
        self._trainable = [unit for unit in units if unit.is_trainable]
        self._sharded = [unit for unit in units if unit.weights.policy.weights_sharded]
        self._events = events
        self._clock = clock
        self._end_callback: BackwardEndCallback | None = None
        self._forward_has_grad = False
        self._locked: list[Unit] = []
        self._graphs = ForwardGraphs()
        self._left: set[Unit] = set()
        self._used_before: list[Unit] = []
        self._entered: list[Unit] = []
        self._place = -1
        self._order = Order(self.units, prefetch)
        self._containers = containers(model)
        self._gathers = GatherOrders(self.units, self._containers)
        self._for_training: tuple[Order, GatherOrders] | None = None
        self._kept: list[Unit] = []
        self._reduces = ReduceQueue(clock, events.reduced)
        self._running: list[HookedModule] = []
        self.saved_tensors = SavedTensorGuard(self.units, self.gather)
        modules = hooked_modules(model, self.units)
        self._modules = list(modules.values())
        self._handles = self._hook(model, modules)

    def gather(self, unit: Unit, ahead: Sequence[Unit] = ()) -> None:
        """Gather a unit's weights; the gathers of those `ahead` are issued before it waits."""
        self._gathers.gather(unit, ahead)
        if unit.weights.state is not WeightsState.GATHERED:
            with self._clock.phase("wait for gather"):
                unit.weights.wait_gather()

    def release_all(self) -> None:
        """Release what rests sharded."""
        for unit in self._sharded:
            unit.weights.release()

    def rest(self) -> None:
        """Between passes: sharded weights are released and no module is running."""
        self._gathers.drop()
        self.release_all()
        for module in self._modules:
            module.depth = 0
            module.borrowed_units = []
        self._running = []
        self._enter_phase(_IDLE)
        self._reduces.begin([], reduces=False)
        self._left = set()
        self._graphs.end_backward()
        self._graphs.begin()

    def abandon(self) -> None:
        """Wait for what is in flight, drop the gradients of this step, and rest."""
        self.unlock_all()
        self._finish_updates()  # the last step's update may still have to read the gradients
        for unit in self._trainable:
            unit.grads.clear()
        self._reduces.forget()
        self.rest()

    def drop_gradients(self) -> None:
        """Drop the gradients of this step. Outside of a backward, forwards stay as they are: theirs may follow."""
        if self.phase is not _IDLE:
            self.abandon()
        elif any(unit.grads.has_gradients for unit in self._trainable):
            self._finish_updates()
            for unit in self._trainable:
                unit.grads.clear()
        else:
            for unit in self._trainable:
                unit.grads.drop_local()

    def remove(self) -> None:
        """Take the hooks off the model."""
        self.unlock_all()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin_inference(self, keeps: Sequence[Unit], ahead: int) -> None:
        """From here to `end_inference`, passes only compute, one after the other: the units of `keeps` stay gathered,
        the others are gathered up to `ahead` before their use, across the end of a pass. A collective."""
        self._gathers.drop()
        self.release_all()
        self._kept = [unit for unit in self._sharded if unit in keeps]
        for unit in self._kept:
            unit.weights.lock()
        self._for_training = self._order, self._gathers
        moving = [unit for unit in self._sharded if unit not in self._kept]
        self._order = CyclicOrder(self.units, moving, ahead)
        self._gathers = CyclicGatherOrders(moving, self._containers, ahead)

    def end_inference(self) -> None:
        """Release what stayed gathered, and what was gathered ahead of a pass that does not come."""
        if self._for_training is not None:
            (self._order, self._gathers), self._for_training = self._for_training, None
            while self._kept:
                self._kept.pop().weights.unlock()
            self.release_all()

    def forward_order(self) -> list[Unit]:
        """The units in the order of their first use."""
        return self._order.forward

    def reduced_part(self) -> float:
        """How much of the trainable units this backward has left, from 0 to 1."""
        return 1.0 - self._reduces.outstanding / len(self._trainable)

    def _finish_updates(self) -> None:
        for unit in self.units:
            if unit.states.is_offloaded:
                unit.finish_update()

    def _enter_phase(self, phase: Phase) -> None:
        """The one place where the phase changes."""
        if phase is not self.phase and phase not in _NEXT[self.phase]:
            raise RuntimeError(f"a {phase.value} cannot begin inside a {self.phase.value}")
        self.phase = phase
        self._end_callback = None

    # Forward

    def _before_forward(self, module: HookedModule, _: nn.Module, args: Any, kwargs: Any) -> Any:
        refuse_transforms()
        recompute = inside_backward()
        if not recompute:
            if module.is_root and not module.depth:
                self._begin_forward()
            module.depth += 1
            self._running.append(module)
            for unit in module.units:
                self._record(unit)
        for unit in module.units:
            self.gather(unit, self._order.before(unit) if recompute else self._order.after(self._place))
            if not recompute and unit is self._order.last:
                self._events.last_unit()
        closing = self._count_uses(module.units, recompute)
        if not closing:
            return None
        leave, graph = self._leave_recompute if recompute else self._leave, self._graph
        again = partial(self.reach, graph, closing, [unit.weights.generation for unit in closing])
        return mark_inputs(args, kwargs, OncePerBackward(partial(leave, graph, closing), again))

    @property
    def _graph(self) -> ForwardGraph:
        """Of the forward that runs, or that a backward recomputes."""
        return self._graphs.in_backward if inside_backward() else self._graphs.newest

    def _count_uses(self, units: Sequence[Unit], recompute: bool) -> list[Unit]:
        """Count a use of each unit; returns those that the backward leaves with this use."""
        has_grad = torch.is_grad_enabled()
        if recompute:
            return list(units) if has_grad else []
        closing = []
        for unit in units:
            uses = self._graphs.newest.uses[unit]
            if not has_grad:
                uses.without_grad += self._forward_has_grad
            else:
                if uses.with_grad == 0:
                    closing.append(unit)
                uses.with_grad += 1
        return closing

    def _after_forward(self, module: HookedModule, _: nn.Module, args: Any, output: Any) -> None:
        units = [*module.units, *module.borrowed_units] if module.borrowed_units else module.units
        if not inside_backward():
            self._end_call(module, units)
            if module.is_root and not module.depth:
                self._end_forward(module)
        # Also at a root without units: only its outputs tell the outermost backward from those inside checkpoints.
        if torch.is_grad_enabled() and (units or module.is_root):
            generations = [unit.weights.generation for unit in units]
            reach = OncePerBackward(partial(self.reach, self._graph, units, generations))
            outputs = (output,) if isinstance(output, torch.Tensor) else outputs_in(output)
            for tensor in (*outputs, *kept_by(module.inside)):
                if tensor.grad_fn is not None:
                    tensor.register_hook(reach)

    def _end_call(self, module: HookedModule, units: Sequence[Unit]) -> None:
        # A call that raised an exception which the model caught did not arrive here.
        while self._running and self._running.pop() is not module:
            pass
        module.depth = max(0, module.depth - 1)  # a backward inside the forward has set it to 0
        if module.depth:
            return
        for unit in units:
            ends = unit.name in module.ends or unit in module.borrowed_units
            if ends and unit.weights.policy.weights_sharded and not self._stays(module, unit):
                unit.weights.release()
        module.borrowed_units = []

    def read(self, unit: Unit) -> None:
        """A parameter is used by hand. Outside of forward and backward it stays released: when that use ends is
        unknown."""
        if not unit.weights.policy.weights_sharded:
            return
        if inside_backward():  # a recomputation
            self.gather(unit)
        elif self._running:
            self._borrow(self._running[-1], unit)

    def _borrow(self, module: HookedModule, unit: Unit) -> None:
        if unit not in module.units and unit not in module.borrowed_units:
            module.borrowed_units.append(unit)
            self._count_uses([unit], recompute=False)
        self._record(unit)
        self.gather(unit, self._order.after(self._place))

    def _begin_forward(self) -> None:
        self._drop_broken()
        self._graphs.begin()
        self._entered = []
        self._place = -1
        self._forward_has_grad = torch.is_grad_enabled()
        self._gathers.begin("forward" if self._forward_has_grad else "evaluation")

    def _end_forward(self, root: HookedModule) -> None:
        self._gathers.finish((*root.units, *self._order.staying) if self._forward_has_grad else ())
        # Evaluation passes do not update the recorded order: one rank alone may evaluate.
        if self._forward_has_grad or self._order.learns_from_evaluation:
            self._order.record(self._entered)

    def _record(self, unit: Unit) -> None:
        if not self._entered or self._entered[-1] is not unit:
            self._entered.append(unit)
            self._place = self._order.place(unit, self._place)

    def _stays(self, module: HookedModule, unit: Unit) -> bool:
        """Whether a unit stays gathered because the backward begins with it."""
        # A re-entrant checkpoint turns gradients off inside a forward that has them on.
        has_backward = torch.is_grad_enabled() or (self._forward_has_grad and self._modules[0].depth > 0)
        return has_backward and (module.is_root or self._order.is_needed_next(unit, self._place + 1))

    # Backward

    def begin_backward(self) -> None:
        """From here to `end_backward`, gradients arrive."""
        if self.phase is _BACKWARD:
            return
        self._events.begins()
        self._enter_phase(_BACKWARD)
        self._finish_updates()
        reduces = self._events.reduces()
        if reduces or any(unit.grads.is_cut_by_node for unit in self._trainable):
            self._order.agree()
        self._gathers.begin("backward")
        # In a pipeline, a step is the fullest in its first backward, when the activations of all micro-batches are
        # there. Buffers in flight would then take more than replicated gradients, which rest from the second on:
        # test_planning_pp.check_order.
        is_fullest = self._graphs.have_others() and not any(unit.grads.has_gradients for unit in self._trainable)
        trainable = [unit for unit in self._order.backward if unit.is_trainable]
        self._reduces.begin(trainable, reduces, overlaps=not is_fullest)

    def end_backward(self) -> None:
        """Finish what the backward left open: units that no use reached are reduced as zeros; all weights rest."""
        if self.phase is not _BACKWARD:
            return
        self._reduce_done()
        self._gathers.finish(between=self._reduce_done)
        self._reduces.reduce_rest()
        self.rest()
        self.saved_tensors.end()
        self._check_late()
        self._events.ended()

    def reduce_all(self) -> None:
        """Reduce every unit now: for gradients that were left to `step()`."""
        left = [unit for unit in self._trainable if not unit.grads.is_reduced]
        if left:
            self._order.agree()
            for unit in self._order.backward:
                if unit.is_trainable and not unit.grads.is_reduced:
                    self._reduces.start(unit)
        self._reduces.finish()

    def bring(self, grads: Mapping[str, torch.Tensor]) -> None:
        """Add gradients that were computed outside of a backward, by parameter, as if a backward had left them."""
        self._events.begins()
        self._finish_updates()
        for unit in self._trainable:
            if not grads.keys().isdisjoint(unit.names):
                unit.grads.bring([grads.get(name) for name in unit.names])
        reduces = self._events.reduces()
        if reduces:
            self._order.agree()
        self._reduces.begin([unit for unit in self._order.backward if unit.is_trainable], reduces)
        self._reduces.reduce_rest()
        self._reduces.begin([], reduces=False)
        self.saved_tensors.end()
        self._events.ended()

    def keep_gathered(self) -> None:
        """Gather all weights and keep them until `unlock_all`, between passes. On all ranks."""
        for unit in self._sharded:
            self.gather(unit)
            self._lock(unit)
        self._gathers.all_gathered = True

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Between passes: within it all weights are gathered. On all ranks."""
        for unit in self._sharded:
            self.gather(unit)
        try:
            yield
        finally:
            self.release_all()

    def is_stale(self) -> bool:
        """Whether an exception ended a backward without word to the schedule."""
        return self.phase is _BACKWARD and not inside_backward()

    def unlock_all(self) -> None:
        """Release what a backward with `create_graph` left gathered for the backward through its graph."""
        self._gathers.all_gathered = False
        while self._locked:
            self._locked.pop().weights.unlock()

    def reach(self, graph: ForwardGraph, units: Sequence[Unit], generations: Sequence[int]) -> None:
        """The backward reaches a module: its units' weights are needed, and their gradients will arrive."""
        self._begin_plain_backward()
        self._graphs.reach(graph)
        for unit, generation in zip(units, generations, strict=True):
            if unit.weights.generation != generation:
                raise RuntimeError(
                    f"the weights of {unit.name} were changed between this forward and its backward, so its "
                    "gradients would be wrong: call engine.step() only after the backward of every forward"
                )
            self.gather(unit, self._order.before(unit))
            if torch.is_grad_enabled():
                self._lock(unit)
            if unit.is_trainable and self.phase is _BACKWARD:
                unit.grads.open()
        self._reduce_done()

    def _begin_plain_backward(self) -> None:
        """Note a backward that the user started; it leaves gradients on parameters, or it does not."""
        if self._end_callback is not None:
            self._drop_broken()
        if self.phase is not _IDLE:
            return
        if leaves_gradients_on(param for unit in self._trainable for param in unit.params):
            self._events.check_plain_backward()
            self.begin_backward()
            self._end_callback = BackwardEndCallback(self.end_backward)
        else:
            self._enter_phase(_AUTOGRAD_GRAD)
            self._end_callback = BackwardEndCallback(self._end_autograd_grad)

    def _drop_broken(self) -> None:
        """Forget a backward that an exception ended without word to the schedule."""
        is_broken = self._end_callback is not None and not self._end_callback.is_pending()
        if self.phase is _BACKWARD and (is_broken or self.is_stale()):
            self._events.broken_backward()
        elif self.phase is _AUTOGRAD_GRAD and is_broken:
            self._end_autograd_grad()

    def _end_autograd_grad(self) -> None:
        if self.phase is _AUTOGRAD_GRAD:
            self._enter_phase(_IDLE)
            self._graphs.end_backward(spends=False)
            self._release_unused(self.units)

    def _release_unused(self, units: Sequence[Unit]) -> None:
        """Release what no running module uses."""
        used = [unit for module in self._running for unit in (*module.units, *module.borrowed_units)]
        for unit in units:
            if unit.weights.policy.weights_sharded and unit not in used:
                unit.weights.release()

    def _lock(self, unit: Unit) -> None:
        """Keep the weights for the backward through the graph that this backward makes: nothing tells where it
        begins."""
        if unit.weights.policy.weights_sharded and unit not in self._locked:
            self._locked.append(unit)
            unit.weights.lock()

    def _leave(self, graph: ForwardGraph, closing: Sequence[Unit]) -> None:
        if self.phase is _AUTOGRAD_GRAD:
            self._release_unused(closing)
        if self.phase is not _BACKWARD:  # IDLE: a backward inside the forward of the module
            return
        for unit in closing:
            if graph.uses[unit].without_grad == 0:
                self._done(graph, unit)

    def _leave_recompute(self, graph: ForwardGraph, closing: Sequence[Unit]) -> None:
        if self.phase is not _BACKWARD:
            return
        for unit in closing:
            uses = graph.uses[unit]
            uses.recomputed += 1
            if uses.with_grad == 0 and uses.recomputed == uses.without_grad:
                self._done(graph, unit)

    def _done(self, graph: ForwardGraph, unit: Unit) -> None:
        if unit in self._left or self._is_awaited(graph, unit):
            return
        self._left.add(unit)
        if unit.weights.policy.weights_sharded:
            unit.weights.release()
        self._reduce_done()

    def _is_awaited(self, graph: ForwardGraph, unit: Unit) -> bool:
        """Whether a backward that has left a unit in a graph may bring further gradients: from uses before it."""
        earlier = list(self._graphs.using(unit, before=graph))
        if not earlier:
            return self._is_used_before(unit)
        # The earlier forward has a part in this backward, or it has its own. Autograd cannot tell where gradients are
        # added up on the parameters, and where a re-entrant checkpoint brings them, in a task of its own: there the
        # reduction waits for the end.
        is_added_up = unit.weights.policy.grads_cut == "replicated"
        is_recomputed = any(each.uses[unit].without_grad for each in (*earlier, graph)) or not adds_to_all(unit.params)
        return unit.is_trainable and (is_added_up or is_recomputed or awaits_gradient(unit.params))

    def _reduce_done(self) -> None:
        """Reduce what this rank's backward has left, or has no part in, as far as the order allows."""
        self._reduces.advance(self._is_ready)

    def _is_ready(self, unit: Unit) -> bool:
        return unit in self._left or self._is_skipped(unit)

    def _is_used_before(self, unit: Unit) -> bool:
        """Whether something outside of the unit's modules used its parameters before they did. Then the unit is
        reduced at the end of the backward, from now on."""
        if unit not in self._used_before and awaits_gradient(unit.params):
            self._used_before.append(unit)
        return unit in self._used_before

    def _is_skipped(self, unit: Unit) -> bool:
        """Whether this rank's backward has no part in a unit, and its gather, which others may need, is behind it."""
        if not unit.comm.is_checked or self._graphs.have_used(unit):
            return False
        is_awaited = inside_backward() and adds_to(unit.params)
        return not is_awaited and self._gathers.passes(unit, self._is_to_come)

    def _is_to_come(self, unit: Unit) -> bool:
        """Whether the backward has yet to reach a unit."""
        is_released = unit.weights.state is WeightsState.RELEASED
        return is_released and unit not in self._left and self._graphs.have_used(unit)

    def _check_late(self) -> None:
        late = [unit.name for unit in self._trainable if unit.grads.late_gradient()]
        if late:
            self.abandon()
            raise RuntimeError(
                f"gradients of {', '.join(late)} arrived after the backward had left the unit, so they are in no "
                "rank's sum, and this step's gradients were dropped: compute penalties on parameters after the "
                "forward, not before it, and call backward for each forward before the next one"
            )

    def _hook(self, model: nn.Module, modules: dict[str, HookedModule]) -> list[RemovableHandle]:
        handles: list[RemovableHandle] = []
        untraced: Callable[..., Any] = torch._dynamo.disable  # hooks break no compiled graph: test_compiled_models
        for path, hooked in modules.items():
            module = model.get_submodule(path)
            enter, leave = (
                ours(untraced(partial(hook, hooked))) for hook in (self._before_forward, self._after_forward)
            )
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave))
        return handles
