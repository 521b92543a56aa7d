"""What the schedule asks of autograd: when a backward reaches a place, leaves it, or ends, and what it will do.

A backward is a *task* of autograd; a re-entrant checkpoint starts another inside it. A task knows which nodes it will
execute. So the schedule can tell a backward that leaves gradients on parameters from one that does not
(`torch.autograd.grad` on activations).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from shardwise.tensors import map_tensors, tensors_in
from shardwise.unit import Unit
from shardwise.unit.params import PLAINLY
from shardwise.unit.saved_tensors import Saved, has_other_hooks, save, storage_of
from shardwise.unit.weights import WeightsState

current_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that this thread is in; -1 outside of one."""


def inside_backward() -> bool:
    return current_task() != -1


def leaves_gradients_on(params: Iterable[torch.Tensor]) -> bool:
    """Whether the current backward adds to `p.grad` of any parameter, as far as it knows: one without a choice of
    inputs may reach others inside a re-entrant checkpoint. To ask in hooks on tensors that it does not end at."""
    with PLAINLY():
        trained = [param for param in params if param.requires_grad]  # none, where a GAN's other model is trained
        if trained and torch.autograd.Variable._execution_engine.is_checkpoint_valid():
            return True
        return any(map(_is_added_to, trained))


def awaits_gradient(params: Iterable[torch.Tensor]) -> bool:
    """Whether the current backward has yet to bring a gradient to a parameter that has none."""
    with PLAINLY():
        return any(map(_is_added_to, [param for param in params if param.grad is None and param.requires_grad]))


def adds_to(params: Iterable[torch.Tensor]) -> bool:
    """Whether the current backward brings, or has brought, a gradient to one of the parameters."""
    with PLAINLY():
        return any(param.requires_grad and _is_added_to(param) for param in params)


def adds_to_all(params: Iterable[torch.Tensor]) -> bool:
    """Whether the current backward itself brings a gradient to every parameter, and no re-entrant checkpoint inside
    it."""
    with PLAINLY():
        return all(_is_added_to(param) for param in params if param.requires_grad)


def _is_added_to(param: torch.Tensor) -> bool:
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(param).node)
    except RuntimeError:  # torch does not answer for a leaf whose gradient torch.autograd.grad returns
        return False


class _Choice:
    """Whether a backward was asked for the gradients of chosen tensors, as `torch.autograd.grad` does: it then goes no
    further than these."""

    def __init__(self) -> None:
        self._task_without = -1

    def ends_here(self, task: int) -> bool:
        """In a hook on a tensor: whether the current backward, number `task`, ends at this tensor."""
        if task == self._task_without:
            return False
        node = torch._C._current_autograd_node()
        if node is None or any(_is_executed(child) for child, _ in node.next_functions if child is not None):
            # Autograd says so in a node that it executes; in hooks on chosen tensors it does not.
            if torch.autograd.Variable._execution_engine.is_checkpoint_valid():
                self._task_without = task
            return False
        return True


_CHOICE = _Choice()


def _is_executed(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch does not answer for a leaf whose gradient torch.autograd.grad returns: it is reached
        return True


def refuse_transforms(is_sharded: bool) -> None:
    """Raise inside the transforms of `torch.func`, where the schedule cannot follow the backward, and while
    `torch.jit.trace` records sharded weights, together with the collectives that gather them."""
    if is_sharded and torch._C._get_tracing_state() is not None:
        raise RuntimeError(
            "a module with sharded weights is being traced (torch.jit.trace, torch.onnx.export, TensorBoard's "
            "add_graph): trace a plain copy, copy.deepcopy(engine.module), made on all ranks"
        )
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            "a module under an engine runs inside a transform of torch.func, whose backward cannot be followed: use "
            "torch.autograd.grad, or transform a plain copy, copy.deepcopy(engine.module)"
        )


class BackwardEndCallback:
    """A call at the end of the current backward. torch drops it if an exception ends that backward."""

    def __init__(self, call: Callable[[], None]) -> None:
        def end() -> None:
            call()

        self._end = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def is_pending(self) -> bool:
        return self._end() is not None


class OncePerBackward:
    """A hook on tensors that calls `reached` once in each backward that goes on from them. Where that backward makes a
    graph of its own, `again` is called once in each backward through that graph, before it reaches what came after this
    place.

    Autograd calls the hooks of a tensor in the order of registration: that of the module which made it first. Those
    that came `later`, of modules that use it or hand it on, are called before that, the last one first, as the backward
    goes through their modules: a rank leaves a unit, and reduces it, before it gathers the next. Otherwise ranks that
    skip units wait for each other (test_gather_order.test_units_that_hand_on_their_outputs,
    test_blocks_that_return_their_input).
    """

    __slots__ = ("_again", "_later", "_reached", "_task")

    def __init__(self, reached: Callable[[], None], again: Callable[[], None] | None = None) -> None:
        self._reached = reached
        self._again = again
        self._task = -1
        self._later: list[OncePerBackward] = []

    def watch(self, tensor: torch.Tensor) -> None:
        """Be called when a backward reaches a tensor."""
        for hook in (tensor._backward_hooks or {}).values():
            if isinstance(hook, OncePerBackward) and hook is not self:
                hook._later.append(self)
        tensor.register_hook(self)

    def __call__(self, grad: torch.Tensor | None) -> None:
        if self._again is not None and grad is not None and grad.requires_grad:
            grad.register_hook(OncePerBackward(self._again))
        task = current_task()
        if task != self._task and not _CHOICE.ends_here(task):
            for hook in reversed(self._later):
                hook.enter(task)
            self.enter(task)

    def enter(self, task: int) -> None:
        """The backward number `task` goes on from here."""
        if task != self._task:
            self._task = task
            self._reached()


class _Boundary(torch.autograd.Function):
    """An identity whose backward runs when the backward has left everything after it."""

    @staticmethod
    def forward(ctx: Any, leave: OncePerBackward, *tensors: torch.Tensor) -> Any:
        ctx.leave = leave
        ctx.set_materialize_grads(False)
        return tensors if len(tensors) > 1 else tensors[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        for grad in grads:
            ctx.leave(grad)
        return (None, *grads)


def mark_inputs(args: Any, kwargs: Any, leave: OncePerBackward) -> Any:
    """Have `leave` called when the backward reaches what made the inputs; leaves get an identity in front.

    Returns new arguments if some were replaced, else None.
    """
    marked = {id(t): t for t in tensors_in(*args, *kwargs.values()) if t.requires_grad}
    made = [tensor for tensor in marked.values() if tensor.grad_fn is not None]
    for tensor in made:
        leave.watch(tensor)
    if made or not marked:
        return None
    outputs = _Boundary.apply(leave, *marked.values())  # type: ignore[no-untyped-call]  # torch
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    replaced: dict[int, torch.Tensor] = dict(zip(marked, outputs, strict=True))

    def change(tensor: torch.Tensor) -> torch.Tensor:
        return replaced.get(id(tensor), tensor)

    return map_tensors(args, change), map_tensors(kwargs, change)


class _Saved(NamedTuple):
    """A tensor in a unit's buffer that a backward will read."""

    saved: Saved
    unit: Unit


class SavedTensorGuard:
    """Gathers the weights that a backward finds released, for backwards that do not begin at a module's outputs.

    A tensor that a module neither returns nor keeps in its attributes (a loss appended to a global list, what a user's
    hook caught) may start a backward inside the module before its outputs are reached. Only autograd's hooks on saved
    tensors see that, and they cost a call for each saved tensor. So the first training forward runs under such hooks;
    if its backward needed them, all later forwards do too.
    """

    def __init__(self, units: Sequence[Unit], gather: Callable[[Unit], None]) -> None:
        self._sharded = [unit for unit in units if unit.weights.policy.weights_sharded]
        self._units: dict[int, Unit] = {}
        self._gather = gather
        self._is_watching = bool(self._sharded)
        self._is_needed = False

    def watching(self) -> contextlib.AbstractContextManager[Any]:
        """Around a forward. Hooks on saved tensors that the user has set are left alone."""
        if not self._is_watching or not torch.is_grad_enabled() or has_other_hooks():
            return contextlib.nullcontext()
        # Anew for each forward: a buffer whose storage the user has a numpy array of gets another one.
        self._units = {unit.weights.storage_id: unit for unit in self._sharded}
        return saved_tensors_hooks(self._pack, self._unpack)

    def end(self) -> None:
        """A backward is over."""
        self._is_watching = self._is_needed

    def _pack(self, tensor: torch.Tensor) -> Any:
        unit = self._units.get(storage_of(tensor))
        return save(tensor) if unit is None else _Saved(Saved(tensor, tensor._version), unit)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, _Saved):
            if packed.unit.weights.state is not WeightsState.GATHERED:
                self._is_needed = True
                self._gather(packed.unit)
            packed = packed.saved
        tensor: torch.Tensor = packed.read()
        return tensor
