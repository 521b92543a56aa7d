"""When units are gathered, released and reduced: the hooks on their modules, and the order they teach.

Forward: a unit is gathered before the first of its modules runs, while the next units are gathered ahead, and
released after the last. Backward: a hook on each output gathers the unit again and opens its gradients; an identity
on the inputs tells when the backward has left it. Autograd runs nodes in the reverse order of their creation, so by
the time it reaches the identity of a unit's first use, everything that came after is done.

The order in which units are entered is learned from a forward, that of all ranks together; it decides what is gathered
ahead and the order of reductions, which is the same on all ranks however the backward of one of them runs. Gathers are
in one order too, whichever units a rank enters (see `course`).

A parameter may also be used by a module that does not hold it. Released parameters notice (see `pending`): the unit is
then gathered at once and is a guest of the innermost module with hooks that is running, until that returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.profiling import Clock
from shardwise.schedule.autograd import (
    BackwardEndCallback,
    OncePerBackward,
    adds_to,
    awaits_gradient,
    inside_backward,
    leaves_gradients_on,
    mark_inputs,
    refuse_transforms,
)
from shardwise.schedule.gather_order import GatherOrders
from shardwise.schedule.hooks import HookedModule, containers, hooked_modules, ours
from shardwise.schedule.order import Ahead, Order, merged
from shardwise.schedule.reduce_queue import Reductions
from shardwise.schedule.saved_tensors import SavedTensorGuard
from shardwise.tensors import kept_by, outputs_in
from shardwise.unit.unit import Traffic, Unit
from shardwise.unit.weights import WeightsState

_AGREE_EVERY = 100
"""Backwards that reduce, between two times that ranks tell each other in which order they entered the units."""


class Schedule:
    """Drives the units of one model."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], ahead: Ahead, clock: Clock) -> None:
        self.units = list(units)
        self.trainable = [unit for unit in units if unit.grads is not None]
        self.reduces: Callable[[], bool] = lambda: True
        self.on_reduced: Callable[[Unit], None] = lambda unit: None
        self.on_plain_backward: Callable[[], None] = lambda: None
        self.on_broken: Callable[[], None] = self.abandon
        self.on_last_unit: Callable[[], None] = lambda: None
        self._clock = clock
        self._has_company = bool(self.units) and self.units[0].comm.is_checked
        self._in_backward = False
        self._is_looking = False
        self._ending: BackwardEndCallback | None = None
        self._held: list[Unit] = []
        self._used_before: list[Unit] = []
        self._is_loud = False
        self._entered: list[Unit] = []
        self._taught: list[Unit] = []
        self._place = -1
        self._agreements = 0
        self._order = Order(self.units, ahead)
        self._passes = GatherOrders(self.units, containers(model))
        self._reductions = Reductions(clock, lambda unit: self.on_reduced(unit))
        self._sites: list[HookedModule] = []
        self._running: list[HookedModule] = []
        self.rehearsal = SavedTensorGuard(self.units, self.bring)
        self._handles = self._hook(model)
        for unit in self.units:
            unit.weights.on_read = partial(self._read, unit)

    def end_backward(self) -> None:
        """Everything the backward left open: units nobody entered are reduced as zeros; all weights rest."""
        if not self._in_backward:
            return
        self._reduce_done()
        self._passes.finish(between=self._reduce_done)
        self._reductions.reduce_rest()
        self.rest()
        self.rehearsal.end()
        self._check_late()

    def begin_backward(self) -> None:
        """From here to `end_backward`, gradients arrive."""
        if not self._in_backward:
            self._in_backward = True
            self._is_looking = False
            for unit in self.units:
                if unit.states is not None:
                    unit.settle()
            reduces = self.reduces()
            if reduces:
                self._agree()
            self._passes.begin("backward")
            self._reductions.begin([unit for unit in self._order.backward if unit.grads is not None], reduces)

    def reduce_all(self) -> None:
        """Reduce every unit now: for gradients that were left to `step()`."""
        if not all(unit.grads.is_reduced for unit in self.trainable if unit.grads is not None):
            self._agree()
        for unit in self._order.backward:
            if unit.grads is not None and not unit.grads.is_reduced:
                self._reductions.start(unit)
        self._reductions.finish()

    def release_all(self) -> None:
        """Release what rests sharded."""
        for unit in self.units:
            if unit.weights.policy.weights_sharded:
                unit.weights.release()

    def let_go(self) -> None:
        """Give up what a backward that made a graph of its own left gathered for the backward through that."""
        while self._held:
            self._held.pop().weights.unpin()

    def abandon(self) -> None:
        """After an exception: wait out what is in flight, forget the gradients of this step, come to rest."""
        self.let_go()
        for unit in self.trainable:
            assert unit.grads is not None
            if unit.states is not None:
                unit.settle()  # the last step's update may still have to read them
            unit.grads.clear()
        self._reductions.forget()
        self.rest()

    def is_stale(self) -> bool:
        """Whether a backward was broken off by an exception that nobody told us about."""
        return self._in_backward and not inside_backward()

    def reduced_part(self) -> float:
        """How much of the trainable units this backward has left behind, from 0 to 1."""
        return 1.0 - self._reductions.outstanding / len(self.trainable)

    def forward_order(self) -> list[Unit]:
        """The units in the order of their first use."""
        return self._order.forward

    def bring(self, unit: Unit, ahead: Sequence[Unit] = ()) -> None:
        """Make a unit's weights ready, with the gathers of those `ahead` issued before waiting."""
        self._passes.gather(unit, ahead)
        if unit.weights.state is not WeightsState.READY:
            with self._clock.phase("wait for gather"):
                unit.weights.settle()

    def remove(self) -> None:
        """Take the hooks off the model."""
        self.let_go()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def rest(self) -> None:
        """Between passes: sharded weights are released and nothing is entered."""
        self._passes.drop()
        self.release_all()
        for site in self._sites:
            site.depth = 0
            site.borrowed_units = []
        self._running = []
        self._in_backward = self._is_looking = False
        self._ending = None
        self._reductions.begin([], reduces=False)
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

    def _enter(self, site: HookedModule, module: nn.Module, args: Any, kwargs: Any) -> Any:
        refuse_transforms()
        recompute = inside_backward()
        if site.is_root and not recompute and not site.depth:
            self._begin_forward()
        if not recompute:
            site.depth += 1
            self._running.append(site)
        index = self._record(site, recompute)
        for unit in site.units:
            self.bring(unit, self._order.behind(unit) if recompute else self._order.ahead(index))
            if not recompute and unit is self._order.last:
                self.on_last_unit()
        if not torch.is_grad_enabled():
            self._count_quiet(site, recompute)
            return None
        leave = self._leave_recompute if recompute else self._leave
        closing = [unit for unit in site.units if recompute or unit.traffic.loud_uses == 0]
        if not recompute:
            for unit in site.units:
                unit.traffic.loud_uses += 1
        if not closing:
            return None
        again = partial(self.reach, closing, [unit.weights.generation for unit in closing])
        return mark_inputs(args, kwargs, OncePerBackward(partial(leave, closing), again))

    def _exit(self, site: HookedModule, module: nn.Module, args: Any, output: Any) -> None:
        units = site.units + site.borrowed_units
        if not inside_backward():
            self._end_call(site, units)
            if site.is_root and not site.depth:
                self._end_forward(site)
        # Also at a root without units: only its outputs tell the outermost backward from those inside checkpoints.
        if torch.is_grad_enabled() and (units or site.is_root):
            visit = OncePerBackward(partial(self.reach, units, [unit.weights.generation for unit in units]))
            outputs = (output,) if isinstance(output, torch.Tensor) else outputs_in(output)
            for tensor in (*outputs, *kept_by(site.inside)):
                if tensor.grad_fn is not None:
                    tensor.register_hook(visit)

    def _end_call(self, site: HookedModule, units: Sequence[Unit]) -> None:
        # A call that raised an exception which the model caught has not come here.
        while self._running and self._running.pop() is not site:
            pass
        site.depth = max(0, site.depth - 1)  # a backward inside the forward has set it to 0
        if site.depth:
            return
        for unit in units:
            ends = unit.name in site.ends or unit in site.borrowed_units
            if ends and unit.weights.policy.weights_sharded and not self._stays(site, unit):
                unit.weights.release()
        site.borrowed_units = []

    def _read(self, unit: Unit) -> None:
        """A parameter is used by hand. Outside of forward and backward nobody could tell for how long."""
        if not unit.weights.policy.weights_sharded:
            return
        if inside_backward():  # a recomputation
            self.bring(unit)
        elif self._running:
            self._invite(self._running[-1], unit)

    def _invite(self, site: HookedModule, unit: Unit) -> None:
        if unit not in site.units and unit not in site.borrowed_units:
            site.borrowed_units.append(unit)
            if torch.is_grad_enabled():
                unit.traffic.loud_uses += 1
            elif self._is_loud:
                unit.traffic.quiet_uses += 1
        self._note_entry(unit)
        self.bring(unit, self._order.ahead(self._place))

    def _begin_forward(self) -> None:
        self._drop_broken()
        self._entered = []
        self._place = -1
        self._is_loud = torch.is_grad_enabled()
        self._passes.begin("forward" if self._is_loud else "evaluation")

    def _end_forward(self, root: HookedModule) -> None:
        self._passes.finish((*root.units, *self._order.staying) if self._is_loud else ())
        # Evaluation is no teacher: one rank alone may evaluate, and the order must stay the same on all.
        if self._is_loud:
            self._taught = self._entered
            if not self._has_company:
                self._order.learn(self._taught)

    def _agree(self) -> None:
        """Make one order of those in which the ranks entered the units: they may differ."""
        if self._has_company and self._agreements % _AGREE_EVERY == 0:
            numbers = [self.units.index(unit) for unit in self._taught]
            everyone = self.units[0].comm.share_object(numbers, "the order of units")
            self._order.learn([self.units[number] for number in merged(everyone)])
        self._agreements += 1

    def _record(self, site: HookedModule, recompute: bool) -> int:
        for unit in site.units if not recompute else ():
            self._note_entry(unit)
        return self._place

    def _note_entry(self, unit: Unit) -> None:
        if self._entered[-1:] != [unit]:
            self._entered.append(unit)
            self._place = self._order.place(unit, self._place)

    def _stays(self, site: HookedModule, unit: Unit) -> bool:
        """A unit that is gathered when the backward begins is not released just to be gathered again."""
        # A re-entrant checkpoint turns gradients off inside a forward that has them on.
        has_backward = torch.is_grad_enabled() or (self._is_loud and self._sites[0].depth > 0)
        return has_backward and (site.is_root or self._order.is_needed_next(unit, self._place + 1))

    def _count_quiet(self, site: HookedModule, recompute: bool) -> None:
        if self._is_loud and not recompute:
            for unit in site.units:
                unit.traffic.quiet_uses += 1

    # Backward

    def reach(self, units: Sequence[Unit], generations: Sequence[int]) -> None:
        """The backward reaches a site: its units' weights are needed, and their gradients will arrive."""
        self._begin_plain_backward()
        for unit, generation in zip(units, generations, strict=True):
            if unit.weights.generation != generation:
                raise RuntimeError(
                    f"the weights of {unit.name} were changed between this forward and its backward, so its "
                    "gradients would be wrong: call engine.step() only after the backward of every forward"
                )
            self.bring(unit, self._order.behind(unit))
            if torch.is_grad_enabled():
                self._hold(unit)
            if unit.grads is not None and not self._is_looking:
                unit.grads.open()
        self._reduce_done()

    def _begin_plain_backward(self) -> None:
        """A backward of the user's own begins; it leaves gradients on parameters, or it only looks."""
        if self._ending is not None:
            self._drop_broken()
        if self._in_backward or self._is_looking:
            return
        if leaves_gradients_on(param for unit in self.trainable for param in unit.params):
            self.on_plain_backward()
            self.begin_backward()
            self._ending = BackwardEndCallback(self.end_backward)
        else:
            self._is_looking = True
            self._ending = BackwardEndCallback(self._end_look)

    def _drop_broken(self) -> None:
        """Forget a backward that an exception broke off without a word to us."""
        if self._in_backward and (self.is_stale() or (self._ending is not None and not self._ending.is_pending())):
            self.on_broken()
        elif self._is_looking and self._ending is not None and not self._ending.is_pending():
            self._end_look()

    def _end_look(self) -> None:
        self._is_looking = False
        self._ending = None
        self._release_idle(self.units)

    def _release_idle(self, units: Sequence[Unit]) -> None:
        """Release what no forward under way is using."""
        used = [unit for site in self._running for unit in (*site.units, *site.borrowed_units)]
        for unit in units:
            if unit.weights.policy.weights_sharded and unit not in used:
                unit.weights.release()

    def _hold(self, unit: Unit) -> None:
        """This backward makes a graph, whose backward will need the weights, and nothing tells where."""
        if unit.weights.policy.weights_sharded and unit not in self._held:
            self._held.append(unit)
            unit.weights.pin()

    def _leave(self, closing: Sequence[Unit]) -> None:
        if self._is_looking:
            self._release_idle(closing)
            return
        for unit in closing:
            if unit.traffic.quiet_uses == 0:
                self._done(unit)

    def _leave_recompute(self, closing: Sequence[Unit]) -> None:
        if self._is_looking:
            return
        for unit in closing:
            traffic = unit.traffic
            traffic.recomputed += 1
            if traffic.loud_uses == 0 and traffic.recomputed == traffic.quiet_uses:
                self._done(unit)

    def _done(self, unit: Unit) -> None:
        if unit.traffic.is_done or self._is_used_before(unit):
            return
        unit.traffic.is_done = True
        if unit.weights.policy.weights_sharded:
            unit.weights.release()
        self._reduce_done()

    def _reduce_done(self) -> None:
        """Reduce what this rank's backward has left, or has no part in, as far as the order allows."""
        self._reductions.advance(lambda unit: unit.traffic.is_done or self._is_skipped(unit))

    def _is_used_before(self, unit: Unit) -> bool:
        """Whether something outside of the unit's modules used its parameters before they did: then the end of the
        backward is soon enough, and will be from now on."""
        if unit not in self._used_before and awaits_gradient(unit.params):
            self._used_before.append(unit)
        return unit in self._used_before

    def _is_skipped(self, unit: Unit) -> bool:
        """Whether this rank's backward has no part in a unit, and its gather, which others' may need, is behind us."""
        if not self._has_company or unit.traffic != Traffic():
            return False
        is_awaited = inside_backward() and adds_to(unit.params)
        return not is_awaited and self._passes.passes(unit)

    def _hook(self, model: nn.Module) -> list[RemovableHandle]:
        sites = hooked_modules(model, self.units)
        self._sites = list(sites.values())
        handles: list[RemovableHandle] = []
        untraced: Callable[..., Any] = torch._dynamo.disable  # hooks break no compiled graph: test_compiled_models
        for path, site in sites.items():
            module = model.get_submodule(path)
            enter, leave = (ours(untraced(partial(hook, site))) for hook in (self._enter, self._exit))
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave))
        return handles
