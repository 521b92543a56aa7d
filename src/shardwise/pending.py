"""Parameters whose values are on their way: whoever uses one waits for it, and pays nothing otherwise.

`step()` returns while updated weights are still being gathered. A unit's own modules wait for it in their hooks, but
a model is looked at in many other ways: a parameter read by hand, `state_dict`, an optimizer of the user's. So while
a gather is in flight the unit's parameters are of a subclass that torch's own dispatch asks before any operation;
the first one settles the unit, and the parameters are plain again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

# Questions about a parameter that its values have no part in: answered without waiting. `model.zero_grad()` right
# after `step()` asks for `grad` of every parameter and would otherwise wait for the whole gather.
_METADATA = {
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "requires_grad", "ndim", "grad")),
    *(getattr(torch.Tensor, name).__get__ for name in ("is_leaf", "grad_fn", "layout", "is_sparse")),
    *(getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")),
    *(torch.Tensor.size, torch.Tensor.numel, torch.Tensor.dim, torch.Tensor.stride, torch.Tensor.element_size),
    *(torch.Tensor.is_floating_point, torch.Tensor.register_hook, torch.Tensor.is_contiguous),
}


def mark(params: Iterable[torch.Tensor], settle: Callable[[], None]) -> None:
    """From now on, the first operation on one of `params` calls `settle`, which must `unmark` them."""
    for param in params:
        param.__class__ = _pending_class(type(param))
        param._shardwise_settle = settle  # type: ignore[attr-defined]


def unmark(params: Iterable[torch.Tensor]) -> None:
    """Make the parameters plain again."""
    for param in params:
        param.__class__ = type(param).__bases__[0]
        del param._shardwise_settle  # type: ignore[attr-defined]


@cache
def _pending_class(plain: type[torch.Tensor]) -> type[torch.Tensor]:
    return type(f"Pending{plain.__name__}", (plain,), {"__torch_function__": classmethod(_wait_first)})


def _wait_first(cls: type, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if func not in _METADATA:
        for leaf in pytree.tree_iter((args, kwargs)):
            settle = getattr(leaf, "_shardwise_settle", None)
            if settle is not None:
                settle()
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))
