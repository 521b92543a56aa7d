"""Values of other stages: they have a shape, a dtype and a device, and whatever is computed from them is absent too.

Every stage runs the model's own forward from its beginning (see `cut`). What comes before the stage computes nothing
there and gives `AbsentValues`, up to the stage's first block, which takes what the stage has received in their place.
Anything else that a stage would compute from them is another stage's, so it is refused: zeros would train another model
without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from shardwise.errors import ConfigError
from shardwise.tensors import tensors_in

_aten = torch.ops.aten
# They read the shape, the dtype and the device alone.
_BLANKS = {
    each.default
    for each in (
        *(_aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.empty_like, _aten.rand_like, _aten.randn_like),
        *(_aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty),
    )
}


class AbsentValues(torch.Tensor):
    """What another stage has computed, on a stage that has `received` its result, or nothing yet."""

    received: torch.Tensor | None
    is_indexed: bool
    """Whether the forward took the first item of it, as of a tuple."""

    @staticmethod
    def __new__(
        cls, shape: Iterable[int], dtype: torch.dtype, device: torch.device, received: torch.Tensor | None = None
    ) -> AbsentValues:
        make: Any = torch.Tensor._make_wrapper_subclass
        values: AbsentValues = make(cls, tuple(shape), dtype=dtype, device=device)
        values.received, values.is_indexed = received, False
        return values

    @classmethod
    def like(cls, values: torch.Tensor, received: torch.Tensor | None = None) -> AbsentValues:
        return cls(values.shape, values.dtype, values.device, received)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]  # torch's has an option that does not apply
        return f"AbsentValues({tuple(self.shape)})"

    # Attributes of tensors are read as they are.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own use of it

    def __deepcopy__(self, memo: Any) -> AbsentValues:
        return self

    def __getitem__(self, index: Any) -> Any:
        """The first of what a block returns: one that returns a tuple gives the hidden states there."""
        if isinstance(index, int) and index == 0:
            self.is_indexed = True
            return self
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        raise ConfigError(
            "the forward unpacks what another stage computes, and how many items that has cannot be told without "
            "values: take the first item of what a block returns, block(...)[0], or return the hidden states alone"
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch has no types for it
        """The same operation without values: what it would return, absent as well."""
        kwargs = kwargs or {}
        if func in _BLANKS:
            return func(*tree_map_only(AbsentValues, _without_memory, args), **kwargs)
        made = _run_on_meta(func, args, kwargs)
        given = [each for each in tensors_in(args, kwargs) if isinstance(each, AbsentValues)]
        is_in_place = func._schema.is_mutable
        if not tensors_in(made) or (is_in_place and not isinstance(args[0], AbsentValues)):
            name, shape = func.__name__.partition(".")[0], tuple(given[0].shape)
            _refuse(f"the forward reads values ({name} of a tensor of shape {shape})")
        received = next((each.received for each in given if each.received is not None), None)

        def absent(values: torch.Tensor) -> AbsentValues:
            return AbsentValues(values.shape, values.dtype, given[0].device, received)

        return args[0] if is_in_place else tree_map_only(torch.Tensor, absent, made)


def check_present(values: Any, what: Callable[[], str]) -> None:
    """Refuse values that were computed from another stage's."""
    if any(isinstance(each, AbsentValues) for each in tensors_in(values)):
        _refuse(f"{what()} from values")


def _refuse(what: str) -> NoReturn:
    raise ConfigError(
        f"{what} that only another stage has, and stages send each other the hidden states alone: compute what a block "
        "needs besides them from the batch, carry what later layers use in the hidden states, or use ZeRO alone, "
        "shardwise.initialize(model, optimizer, 'zero3')"
    )


def without_values(tensor: torch.Tensor) -> torch.Tensor:
    """The shape and dtype of a parameter or buffer on the meta device; of a DTensor, those of the whole tensor."""
    with _disable_current_modes():  # no fake tensor in a dry run, which would count it
        blank = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return nn.Parameter(blank, requires_grad=False) if isinstance(tensor, nn.Parameter) else blank


def run_without_values(module: nn.Module, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    """What a module on the meta device returns, computing in `dtype`; None if it reads values."""
    try:
        with _disable_current_modes(), torch.no_grad():
            args, kwargs = tree_map_only(torch.Tensor, _on_meta, (args, kwargs))
            return module.to(dtype)(*args, **kwargs)
    except Exception:  # the user's code may raise anything where it has no values
        return None


def _run_on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation returns, on the meta device; None if that depends on values."""
    with torch._C._DisableTorchDispatch():  # a dry run has fake tensors
        args, kwargs = tree_map_only(torch.Tensor, _on_meta, (args, kwargs))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta")}
        try:
            return func(*args, **kwargs)
        except (NotImplementedError, RuntimeError):
            return None


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
