"""When units are gathered, released and reduced: the hooks on their modules, and the order they teach.

Forward: a unit is gathered before the first of its modules runs, while the next units are gathered ahead, and
released after the last. Backward: a hook on each output gathers the unit again and opens its gradients; an identity
on the inputs tells when the backward has left it. Autograd runs nodes in the reverse order of their creation, so by
the time it reaches the identity of a unit's first use, everything that came after is done.

The order in which units are entered is learned from the last forward; it decides what is gathered ahead and the order
of reductions, which is the same on all ranks however the backward of one of them runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.order import Ahead, Order
from shardwise.report import Clock
from shardwise.tensors import map_tensors, tensors_in
from shardwise.unit import Traffic, Unit
from shardwise.weights import State


@dataclass
class Site:
    """A module with hooks, the units its forward uses, and those among them whose run ends with it.

    `depth` counts calls under way: a module may call itself, and only the outermost exit releases.
    """

    is_root: bool
    depth: int = 0
    units: list[Unit] = field(default_factory=list)
    ends: set[str] = field(default_factory=set)


class Schedule:
    """Drives the units of one model."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], ahead: Ahead, clock: Clock) -> None:
        self.units = list(units)
        self.trainable = [unit for unit in units if unit.grads is not None]
        self.reduces: Callable[[], bool] = lambda: True
        self.on_reduced: Callable[[Unit], None] = lambda unit: None
        self.on_plain_backward: Callable[[], None] = lambda: None
        self._clock = clock
        self._in_flight: Unit | None = None
        self._in_backward = False
        self._is_loud = False
        self._reduces_now = False
        self._entered: list[Unit] = []
        self._order = Order(self.units, ahead)
        self._waiting: list[Unit] = []
        self._sites: list[Site] = []
        self._handles = self._hook(model)

    def end_backward(self) -> None:
        """Everything the backward left open: units nobody entered are reduced as zeros; all weights rest."""
        if not self._in_backward:
            return
        for unit in self._waiting:
            self._reduce(unit)
        self._finish_reduce()
        self.rest()
        self._check_late()

    def begin_backward(self) -> None:
        """From here to `end_backward`, gradients arrive."""
        if not self._in_backward:
            self._in_backward = True
            self._reduces_now = self.reduces()
            self._waiting = [unit for unit in self._order.backward if unit.grads is not None]

    def reduce_all(self) -> None:
        """Reduce every unit now: for gradients that were left to `step()`."""
        for unit in self._order.backward:
            if unit.grads is not None and not unit.grads.is_reduced:
                self._start_reduce(unit)
        self._finish_reduce()

    def release_all(self) -> None:
        """Release what rests sharded."""
        for unit in self.units:
            if unit.weights.policy.weights_sharded:
                unit.weights.release()

    def abandon(self) -> None:
        """After an exception: wait out what is in flight, forget the gradients of this step, come to rest."""
        for unit in self.trainable:
            assert unit.grads is not None
            unit.grads.clear()
        self._in_flight = None
        self.rest()

    def is_stale(self) -> bool:
        """Whether a backward was broken off by an exception that nobody told us about."""
        return self._in_backward and not _inside_backward()

    def forward_order(self) -> list[Unit]:
        """The units in the order of their first use."""
        return self._order.forward

    def bring(self, unit: Unit, ahead: Sequence[Unit] = ()) -> None:
        """Make a unit's weights ready, with the gathers of those `ahead` issued before waiting."""
        unit.weights.gather()
        for other in ahead:
            other.weights.gather()
        if unit.weights.state is not State.READY:
            with self._clock.phase("wait for gather"):
                unit.weights.settle()

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def rest(self) -> None:
        """Between passes: sharded weights are released and nothing is entered."""
        self.release_all()
        for site in self._sites:
            site.depth = 0
        self._in_backward = False
        self._waiting = []
        for unit in self.units:
            unit.traffic = Traffic()

    def _check_late(self) -> None:
        late = [unit.name for unit in self.trainable if unit.grads is not None and unit.grads.late_gradient()]
        if late:
            self.abandon()
            raise RuntimeError(
                f"gradients of {', '.join(late)} arrived after the backward had left the unit, so they are in no "
                "rank's sum, and this step's gradients were dropped: compute penalties on parameters after the "
                "forward, not before it, and call backward for each forward before the next one"
            )

    # Forward

    def _enter(self, site: Site, module: nn.Module, args: Any, kwargs: Any) -> Any:
        recompute = _inside_backward()
        if site.is_root and not recompute:
            self._begin_forward()
        site.depth += not recompute
        index = self._record(site, recompute)
        for unit in site.units:
            self.bring(unit, self._order.behind(unit) if recompute else self._order.ahead(index))
        if not torch.is_grad_enabled():
            self._count_quiet(site, recompute)
            return None
        leave = self._leave_recompute if recompute else self._leave
        closing = [unit for unit in site.units if recompute or unit.traffic.loud_uses == 0]
        if not recompute:
            for unit in site.units:
                unit.traffic.loud_uses += 1
        return _mark_inputs(args, kwargs, partial(leave, closing)) if closing else None

    def _exit(self, site: Site, module: nn.Module, args: Any, output: Any) -> None:
        if not _inside_backward():
            site.depth -= 1
            for unit in site.units if not site.depth else ():
                if unit.name in site.ends and unit.weights.policy.weights_sharded and not self._stays(site, unit):
                    unit.weights.release()
            # Evaluation is no teacher: one rank alone may evaluate, and the order must stay the same on all.
            if site.is_root and self._is_loud:
                self._order.learn(self._entered)
        # Also at a root without units: only its outputs tell the outermost backward from those inside checkpoints.
        if torch.is_grad_enabled() and (site.units or site.is_root):
            visit = Visit(self, site.units)
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(visit)

    def _begin_forward(self) -> None:
        if self.is_stale():
            self.abandon()
        self._entered = []
        self._is_loud = torch.is_grad_enabled()

    def _record(self, site: Site, recompute: bool) -> int:
        if not recompute:
            self._entered.extend(unit for unit in site.units if self._entered[-1:] != [unit])
        return len(self._entered) - 1

    def _stays(self, site: Site, unit: Unit) -> bool:
        """A unit that is gathered when the backward begins is not released just to be gathered again."""
        # A re-entrant checkpoint turns gradients off inside a forward that has them on.
        has_backward = torch.is_grad_enabled() or (self._is_loud and self._sites[0].depth > 0)
        return has_backward and (site.is_root or self._order.is_needed_next(unit, len(self._entered)))

    def _count_quiet(self, site: Site, recompute: bool) -> None:
        if self._is_loud and not recompute:
            for unit in site.units:
                unit.traffic.quiet_uses += 1

    # Backward

    def reach(self, units: Sequence[Unit], generations: Sequence[int]) -> None:
        """The backward reaches a site: its units' weights are needed, and their gradients will arrive."""
        if not self._in_backward:
            self.on_plain_backward()
            self.begin_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        for unit, generation in zip(units, generations, strict=True):
            if unit.weights.generation != generation:
                raise RuntimeError(
                    f"the weights of {unit.name} were changed between this forward and its backward, so its "
                    "gradients would be wrong: call engine.step() only after the backward of every forward"
                )
            self.bring(unit, self._order.behind(unit))
            if unit.grads is not None:
                unit.grads.open()

    def _leave(self, closing: Sequence[Unit]) -> None:
        for unit in closing:
            if unit.traffic.quiet_uses == 0:
                self._done(unit)

    def _leave_recompute(self, closing: Sequence[Unit]) -> None:
        for unit in closing:
            traffic = unit.traffic
            traffic.recomputed += 1
            if traffic.loud_uses == 0 and traffic.recomputed == traffic.quiet_uses:
                self._done(unit)

    def _done(self, unit: Unit) -> None:
        if unit.traffic.is_done:
            return
        unit.traffic.is_done = True
        if unit.weights.policy.weights_sharded:
            unit.weights.release()
        while self._waiting and self._waiting[0].traffic.is_done:
            self._reduce(self._waiting.pop(0))

    def _reduce(self, unit: Unit) -> None:
        assert unit.grads is not None
        if self._reduces_now:
            self._start_reduce(unit)
        else:
            unit.grads.collect()

    def _start_reduce(self, unit: Unit) -> None:
        assert unit.grads is not None
        self._finish_reduce()
        unit.grads.start_reduce()
        self._in_flight = unit
        if not unit.grads.flight.overlap:
            self._finish_reduce()

    def _finish_reduce(self) -> None:
        unit, self._in_flight = self._in_flight, None
        if unit is not None:
            assert unit.grads is not None
            with self._clock.phase("finish reduce"):
                unit.grads.finish_reduce()
            self.on_reduced(unit)

    def _hook(self, model: nn.Module) -> list[RemovableHandle]:
        sites = {"": Site(is_root=True)}
        for unit in self.units:
            for run in unit.spec.runs:
                for path in run:
                    sites.setdefault(path, Site(is_root=False)).units.append(unit)
                sites[run[-1]].ends.add(unit.name)
        handles: list[RemovableHandle] = []
        untraced: Callable[..., Any] = torch._dynamo.disable  # hooks break no compiled graph: test_compiled_models
        self._sites = list(sites.values())
        for path, site in sites.items():
            module = model.get_submodule(path)
            handles.append(module.register_forward_pre_hook(untraced(partial(self._enter, site)), with_kwargs=True))
            handles.append(module.register_forward_hook(untraced(partial(self._exit, site))))
        return handles


class Visit:
    """The hook on the outputs of one call of a site's module: acts once in each backward."""

    def __init__(self, schedule: Schedule, units: Sequence[Unit]) -> None:
        self._schedule = schedule
        self._units = list(units)
        self._generations = [unit.weights.generation for unit in units]
        self._task = -1

    def __call__(self, grad: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._schedule.reach(self._units, self._generations)


class _Boundary(torch.autograd.Function):
    """An identity that tells when the backward has left what came after it."""

    @staticmethod
    def forward(ctx: Any, leave: Callable[[], None], *tensors: torch.Tensor) -> Any:
        ctx.leave = leave
        ctx.set_materialize_grads(False)
        return tensors if len(tensors) > 1 else tensors[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.leave()
        return (None, *grads)


def _mark_inputs(args: Any, kwargs: Any, leave: Callable[[], None]) -> Any:
    """Have `leave` called when the backward reaches what made the inputs, or else an identity in front of leaves."""
    marked = {id(t): t for t in tensors_in((args, kwargs)) if t.requires_grad}
    made = [tensor for tensor in marked.values() if tensor.grad_fn is not None]
    for tensor in made:
        tensor.register_hook(lambda grad: leave())
    if made or not marked:
        return None
    outputs = _Boundary.apply(leave, *marked.values())  # type: ignore[no-untyped-call]  # torch
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    replaced: dict[int, torch.Tensor] = dict(zip(marked, outputs, strict=True))

    def change(tensor: torch.Tensor) -> torch.Tensor:
        return replaced.get(id(tensor), tensor)

    return map_tensors(args, change), map_tensors(kwargs, change)


def _inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
