"""What `p.grad` shows while the engine holds the gradient: a tensor with a shape and without values.

Between a backward and `step()` the gradients are in the engine's buffers. A None in `p.grad` would say that there is no
gradient: `torch.nn.utils.clip_grad_norm_` would clip nothing and return 0. So `p.grad` is a `HeldGrad`, which has a
shape, a dtype and a device, uses no memory, and refuses everything else with an error that names the engine's method to
call. It is the same under every stage.

During a backward and in an update, `p.grad` is autograd's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from shardwise.errors import GradientError
from shardwise.unit.params import PLAINLY

_ADD, _ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor


class HeldGrad(torch.Tensor):
    """Stands for the gradient of the parameter `param_name`, which the engine holds.

    Autograd may add to it before the backward reaches a module of the engine: a penalty on parameters, after the
    forward. `arrived` has what it adds, by name.
    """

    param_name: str
    arrived: dict[str, torch.Tensor]

    @staticmethod
    def __new__(cls, param: torch.Tensor, dtype: torch.dtype, name: str, arrived: dict[str, torch.Tensor]) -> HeldGrad:
        make: Any = torch.Tensor._make_wrapper_subclass
        held: HeldGrad = make(cls, param.shape, dtype=dtype, device=param.device, storage_size=0)
        held.param_name, held.arrived = name, arrived
        return held

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]  # torch's has an option that does not apply
        return f"HeldGrad({self.param_name}, {tuple(self.shape)})"

    # Compilers read attributes of `p.grad`, but no values: test_a_module_is_compiled_while_gradients_are_held.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own use of it

    def item(self) -> Any:
        _refuse("item", (self,))

    def tolist(self) -> Any:
        _refuse("tolist", (self,))

    def numpy(self, *, force: bool = False) -> Any:
        _refuse("numpy", (self,))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch has no types for it
        """Refuse every operation, except that autograd adds a gradient, in place unless with `create_graph`."""
        if func not in (_ADD, _ADD_IN_PLACE) or torch._C._current_graph_task_id() == -1:
            _refuse(func.__name__.partition(".")[0], args)
        held, grad = args
        before = held.arrived.get(held.param_name)
        if func is _ADD_IN_PLACE:
            grad = grad.detach().to(held.dtype, copy=True)
        held.arrived[held.param_name] = grad if before is None else before + grad
        return held if func is _ADD_IN_PLACE else held.arrived[held.param_name]


def _refuse(name: str, args: Any) -> NoReturn:
    names = [each.param_name for each in _leaves(args) if isinstance(each, HeldGrad)]
    raise GradientError(
        f"{name} on p.grad of {names[0] if names else 'a parameter'!r}: between backward "
        "and step() the engine holds the gradients, and p.grad has no values. To clip, call "
        "engine.clip_grad_norm_(max_norm) instead of torch.nn.utils.clip_grad_norm_ or Accelerate's; to read, "
        "engine.full_grad(name); to edit, or to clip by value, engine.register_grad_hook(lambda unit, shard: "
        "shard.clamp_(-1, 1)); to drop, engine.zero_grad(). Instead of torch.amp.GradScaler set precision.compute: fp16"
    )


def _leaves(args: Any) -> list[Any]:
    """The arguments, those in lists included."""
    return [leaf for arg in args for leaf in (arg if isinstance(arg, (list, tuple)) else (arg,))]


class HeldGrads:
    """A `HeldGrad` for each of some parameters."""

    def __init__(self, names: Sequence[str], params: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> None:
        self._names = list(names)
        self._arrived: dict[str, torch.Tensor] = {}
        with PLAINLY():
            self._pairs = [
                (param, HeldGrad(param, dtype or param.dtype, name, self._arrived))
                for name, param in zip(names, params, strict=True)
            ]

    def put(self) -> None:
        """Make every `p.grad` a `HeldGrad`."""
        with PLAINLY():
            for param, held in self._pairs:
                param.grad = held

    def changed(self) -> list[tuple[str, torch.Tensor | None]]:
        """What the user has put into `p.grad` since, by the parameter's name; None where it was dropped."""
        with PLAINLY():
            found = [(held.param_name, param.grad) for param, held in self._pairs if param.grad is not held]
        return found and [(name, grad) for name, grad in found if grad is None or grad is not self._arrived.get(name)]

    def take_off(self) -> list[torch.Tensor | None]:
        """Leave every `p.grad` None; returns what autograd has added meanwhile, if anything."""
        with PLAINLY():
            for param, _ in self._pairs:
                param.grad = None
        arrived = [self._arrived.get(name) for name in self._names] if self._arrived else []
        self._arrived.clear()
        return arrived
