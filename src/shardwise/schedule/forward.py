"""The hooks on a model's modules: units are gathered before they compute and released after.

A unit is gathered before the first of its modules runs, while the next units are prefetched, and released after the
last. The hooks also tell the backward where it will need the unit again: a hook on each output for where it reaches the
unit, one on the inputs for where it leaves. In a recomputation, inside a backward, only these are renewed.

A release would lose what a forward has assigned (`param.data = ...`), so that forward raises when it is over.

A parameter may also be used by a module that does not hold it. Released parameters notice (see `unit.params`): the unit
is then gathered at once and borrowed by the innermost hooked module that is running, until that returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.errors import ModelChangedError
from shardwise.schedule.autograd import OncePerBackward, inside_backward, mark_inputs, refuse_transforms
from shardwise.schedule.backward import BackwardPass
from shardwise.schedule.gathers import Gathers
from shardwise.schedule.graphs import ForwardGraphs
from shardwise.schedule.hooks import HookedModule, RunningModules, ours
from shardwise.tensors import kept_by, outputs_in
from shardwise.unit import Unit


class ForwardHooks:
    """The hooks on the modules of one model. `on_last_unit` is called when a forward enters the last unit."""

    def __init__(
        self,
        model: nn.Module,
        running: RunningModules,
        gathers: Gathers,
        graphs: ForwardGraphs,
        backward: BackwardPass,
        on_last_unit: Callable[[], None],
    ) -> None:
        self._running = running
        self._gathers = gathers
        self._graphs = graphs
        self._backward = backward
        self._on_last_unit = on_last_unit
        units = chain.from_iterable(module.units for module in running.modules.values())
        self._is_sharded = any(unit.weights.policy.weights_sharded for unit in units)
        self._has_grad = False
        self._entered: list[Unit] = []
        self._place = -1
        self._error: ModelChangedError | None = None
        self._handles: list[RemovableHandle] = []
        untraced: Callable[..., Any] = torch._dynamo.disable  # hooks break no compiled graph: test_compiled_models
        for path, hooked in running.modules.items():
            module = model.get_submodule(path)
            enter, leave = (ours(untraced(partial(hook, hooked))) for hook in (self._enter, self._leave))
            self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(leave))

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def read(self, unit: Unit) -> bool:
        """A parameter is used by hand. Outside of forward and backward it stays released: when that use ends is
        unknown. Returns whether it is inside."""
        if not unit.weights.policy.weights_sharded:
            return False
        if inside_backward():  # a recomputation, or what was computed inside `gathered`
            self._backward.gather(unit)
        elif self._running.innermost is not None:
            self._borrow(self._running.innermost, unit)
        else:
            return False
        return True

    def _enter(self, module: HookedModule, _: nn.Module, args: Any, kwargs: Any) -> Any:
        refuse_transforms(self._is_sharded)
        if self._running.ignores(module):
            return None
        order = self._gathers.unit_order
        if inside_backward():
            self._backward.recompute(module.units)
            graph, leave = self._graphs.in_backward, self._backward.leave_recompute
            closing = module.units if torch.is_grad_enabled() else ()
        else:
            if module.is_root and not module.depth:
                self._begin()
            self._running.enter(module)
            for unit in module.units:
                self._record(unit)
            for unit in module.units:
                self._gathers.gather(unit, order.after(self._place))
                if unit is order.last:
                    self._on_last_unit()
            graph, leave = self._graphs.newest, self._backward.leave
            closing = self._count_uses(module.units)
        if not closing:
            return None
        again = partial(self._backward.reach, graph, closing, [unit.weights.generation for unit in closing])
        return mark_inputs(args, kwargs, OncePerBackward(partial(leave, graph, closing), again))

    def _leave(self, module: HookedModule, _: nn.Module, args: Any, output: Any) -> None:
        if self._running.ignores(module):
            return
        units = [*module.units, *module.borrowed_units] if module.borrowed_units else module.units
        if inside_backward():
            graph = self._graphs.in_backward
        else:
            graph = self._graphs.newest
            if self._running.leave(module):
                self._release(module, units)
                if module.is_root:
                    self._end(module)
                if self._error is not None and self._running.innermost is None:
                    self._refuse()
        # Also at a root without units: only its outputs tell the outermost backward from those inside checkpoints.
        if torch.is_grad_enabled() and (units or module.is_root):
            generations = [unit.weights.generation for unit in units]
            reach = OncePerBackward(partial(self._backward.reach, graph, units, generations))
            outputs = (output,) if isinstance(output, torch.Tensor) else outputs_in(output)
            for tensor in (*outputs, *kept_by(module.inside)):
                if tensor.grad_fn is not None:
                    reach.watch(tensor)

    def _begin(self) -> None:
        """A forward of the whole model begins."""
        self._backward.forget_broken()
        self._graphs.begin()
        self._entered = []
        self._place = -1
        self._error = None
        self._has_grad = torch.is_grad_enabled()
        self._gathers.gather_orders.begin("forward" if self._has_grad else "evaluation")

    def _end(self, root: HookedModule) -> None:
        order = self._gathers.unit_order
        self._gathers.gather_orders.finish((*root.units, *order.staying) if self._has_grad else ())
        # Evaluation passes do not update the recorded order: one rank alone may evaluate.
        if self._has_grad or order.learns_from_evaluation:
            order.record(self._entered)

    def _release(self, module: HookedModule, units: Sequence[Unit]) -> None:
        """Release the units whose last module this is, and those that it borrowed."""
        for unit in units:
            ends = unit.name in module.ends or unit in module.borrowed_units
            if ends and unit.weights.policy.weights_sharded:
                if not unit.weights.is_locked:  # else the user may keep what was assigned
                    self._error = unit.weights.rebound_error() or self._error
                if not self._stays(module, unit):
                    unit.weights.release()
                else:
                    unit.weights.resume_reading()
        module.borrowed_units = []

    def _refuse(self) -> None:
        """Raise what was found in this forward, when all of its gathers are over and no rank waits for this one."""
        error, self._error = self._error, None
        self._backward.rest()
        assert error is not None
        raise error

    def _stays(self, module: HookedModule, unit: Unit) -> bool:
        """Whether a unit stays gathered because the backward begins with it."""
        # A re-entrant checkpoint turns gradients off inside a forward that has them on.
        has_backward = torch.is_grad_enabled() or (self._has_grad and self._running.root.depth > 0)
        return has_backward and (module.is_root or self._gathers.unit_order.is_needed_next(unit, self._place + 1))

    def _borrow(self, module: HookedModule, unit: Unit) -> None:
        if unit not in module.units and unit not in module.borrowed_units:
            module.borrowed_units.append(unit)
            self._count_uses([unit])
        self._record(unit)
        self._gathers.gather(unit, self._gathers.unit_order.after(self._place))

    def _record(self, unit: Unit) -> None:
        if not self._entered or self._entered[-1] is not unit:
            self._entered.append(unit)
            self._place = self._gathers.unit_order.place(unit, self._place)

    def _count_uses(self, units: Sequence[Unit]) -> list[Unit]:
        """Count a use of each unit; returns those that the backward leaves with this use: the first with gradients."""
        has_grad = torch.is_grad_enabled()
        closing = []
        for unit in units:
            uses = self._graphs.newest.uses[unit]
            if not has_grad:
                uses.without_grad += self._has_grad
            else:
                if uses.with_grad == 0:
                    closing.append(unit)
                uses.with_grad += 1
        return closing
