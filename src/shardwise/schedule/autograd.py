"""What the schedule asks of autograd's graphs: word when a backward reaches a place, leaves it, or is over.

A backward is a *task* of autograd's; a re-entrant checkpoint starts another inside it. Tasks know what they will do, so
one that only looks (`torch.autograd.grad` on activations) is told from one that leaves gradients on parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from shardwise.tensors import map_tensors, tensors_in


def current_task() -> int:
    """The number of the backward that this thread is in; -1 outside of one."""
    return torch._C._current_graph_task_id()


def inside_backward() -> bool:
    return current_task() != -1


def leaves_gradients_on(params: Iterable[torch.Tensor]) -> bool:
    """Whether the backward we are in adds to `p.grad` of any of these, as far as it knows: one without a choice of
    inputs may come to others inside a re-entrant checkpoint."""
    if torch.autograd.Variable._execution_engine.is_checkpoint_valid():
        return True
    with torch._C.DisableTorchFunctionSubclass():
        return any(_is_added_to(param) for param in params if param.requires_grad)


def awaits_gradient(params: Iterable[torch.Tensor]) -> bool:
    """Whether the backward we are in has yet to bring a gradient to one of these that has none."""
    with torch._C.DisableTorchFunctionSubclass():
        return any(param.grad is None and param.requires_grad and _is_added_to(param) for param in params)


def adds_to(params: Iterable[torch.Tensor]) -> bool:
    """Whether the backward we are in brings, or has brought, a gradient to one of these."""
    with torch._C.DisableTorchFunctionSubclass():
        return any(param.requires_grad and _is_added_to(param) for param in params)


def _is_added_to(param: torch.Tensor) -> bool:
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(param).node)
    except RuntimeError:  # torch does not answer for a leaf whose gradient torch.autograd.grad returns
        return False


def refuse_transforms() -> None:
    """Inside `torch.func.grad` and its like there is no graph whose backward could be followed."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            "a module under an engine runs inside a transform of torch.func, whose backward cannot be followed: use "
            "torch.autograd.grad, or transform a plain copy, copy.deepcopy(engine.module)"
        )


class BackwardEndCallback:
    """A call at the end of the backward we are in; torch drops it, and so do we, if an exception breaks that off."""

    def __init__(self, call: Callable[[], None]) -> None:
        def end() -> None:
            call()

        self._end = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def is_pending(self) -> bool:
        return self._end() is not None


class OncePerBackward:
    """A hook on tensors that acts once in each backward. Where that backward makes a graph of its own, `again` acts
    once in each backward through it, before it comes to what was reached after this place."""

    def __init__(self, reached: Callable[[], None], again: Callable[[], None] | None = None) -> None:
        self._reached = reached
        self._again = again
        self._task = -1

    def __call__(self, grad: torch.Tensor | None) -> None:
        if self._again is not None and grad is not None and grad.requires_grad:
            grad.register_hook(OncePerBackward(self._again))
        task = current_task()
        if task != self._task:
            self._task = task
            self._reached()


class _Boundary(torch.autograd.Function):
    """An identity that tells when the backward has left what came after it."""

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
    """Have `leave` called when the backward reaches what made the inputs, or else an identity in front of leaves."""
    marked = {id(t): t for t in tensors_in(args, kwargs) if t.requires_grad}
    made = [tensor for tensor in marked.values() if tensor.grad_fn is not None]
    for tensor in made:
        tensor.register_hook(leave)
    if made or not marked:
        return None
    outputs = _Boundary.apply(leave, *marked.values())  # type: ignore[no-untyped-call]  # torch
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    replaced: dict[int, torch.Tensor] = dict(zip(marked, outputs, strict=True))

    def change(tensor: torch.Tensor) -> torch.Tensor:
        return replaced.get(id(tensor), tensor)

    return map_tensors(args, change), map_tensors(kwargs, change)
