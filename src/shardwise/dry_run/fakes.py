"""Fast operators on fake tensors.

The result of an operator on fake tensors follows from the form of its arguments: shapes, strides, dtypes, numbers. A
model of equal layers uses the same forms many times. Torch's fake mode takes hundreds of microseconds per operator, so
it computes each form once; a remembered result is made again in a tenth of that time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._pytree import tree_leaves

_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default  # a view, though its schema does not say so


class _NotReusable(Exception):
    """An argument has values that may decide the result, or the result cannot be made again."""


Remake = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
"""Makes the result of an operator again, from arguments of the same form."""


class Fakes:
    """Fake tensors of one mode on one device."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        self._mode = mode
        self._device = device
        self._remakes: dict[Any, Remake] = {}
        self._attributes: dict[str, Any] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if func.is_view or func is _UNSAFE_VIEW:
            return self._view(func, args, kwargs)
        if not _follows_from_form(func):
            return func(*args, **kwargs)
        try:
            form = _form(func, args, kwargs)
        except _NotReusable:
            return func(*args, **kwargs)
        if form in self._remakes:
            return self._remakes[form](args, kwargs)
        result = func(*args, **kwargs)
        with contextlib.suppress(_NotReusable):
            if _form(func, args, kwargs) == form:  # otherwise an argument was resized
                self._remakes[form] = self._remake(result, args, kwargs)
        return result

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Computed by the meta kernel: a view shares the storage of its argument, so it cannot be remembered."""
        if args[0].__class__ is not FakeTensor:
            return func(*args, **kwargs)
        with in_kernel_invocation_manager(self._mode):
            made = func(*args, **kwargs)
        if isinstance(made, torch.Tensor):
            return self._fake(made)
        return type(made)(self._fake(each) for each in made)

    def _remake(self, result: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Remake:
        if isinstance(result, torch.Tensor):
            if args and result is args[0]:
                return lambda args, kwargs: args[0]
            if result is kwargs.get("out"):
                return lambda args, kwargs: kwargs["out"]
            return self._remake_storage(result, (args, kwargs))
        if isinstance(result, (list, tuple)):
            kind, parts = type(result), [self._remake(each, args, kwargs) for each in result]
            return lambda args, kwargs: kind(part(args, kwargs) for part in parts)
        if result is None or isinstance(result, int):
            return lambda args, kwargs: result
        raise _NotReusable

    def _remake_storage(self, result: torch.Tensor, arguments: Any) -> Remake:
        is_plain = result.__class__ is FakeTensor and result.constant is None and result.layout == torch.strided
        is_shared = _address(result) in {_address(leaf) for leaf in tree_leaves(arguments) if torch.is_tensor(leaf)}
        if not is_plain or is_shared or result.device != self._device:
            raise _NotReusable
        form = result.shape, result.stride(), result.dtype
        if result.untyped_storage().nbytes() != _empty(*form).untyped_storage().nbytes():
            raise _NotReusable
        return lambda args, kwargs: self._fake(_empty(*form))

    def _fake(self, meta: torch.Tensor) -> FakeTensor:
        """What the constructor of FakeTensor makes, without its checks, which take longer than most operators."""
        if not self._attributes:
            first = FakeTensor(self._mode, meta, self._device)
            self._attributes = dict(first.__dict__)
            return first
        fake: FakeTensor = torch.Tensor._make_subclass(
            FakeTensor, meta, meta.requires_grad, dispatch_device=True, device_for_backend_keys=self._device
        )
        fake.__dict__.update(self._attributes)
        return fake


@cache
def _follows_from_form(func: Any) -> bool:
    """Whether an operator's result follows from the form of its arguments.

    Not if the operator is not torch's own, which may read anything; nor if values decide; nor if an argument becomes a
    view of another. Fake tensors themselves refuse indices whose values would decide a shape.
    """
    decides = {torch.Tag.inplace_view, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    is_torch = func.namespace in ("aten", "prims")
    return is_torch and (func is torch.ops.aten.index.Tensor or not decides & set(func.tags))


def _form(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Everything that decides the result. The default dtype decides that of a division of integers."""
    return func, torch.get_default_dtype(), _form_of(args), _form_of(tuple(kwargs.items()))


def _form_of(value: Any) -> Any:
    if value.__class__ is FakeTensor and value.constant is None:
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_form_of, value))
    if isinstance(value, torch.Tensor):
        raise _NotReusable
    return value.__class__, value  # 1 and 1.0 are equal, but give different dtypes


def _empty(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    with torch._C._DisableTorchDispatch():
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _address(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
