"""What a torch function does with a tensor that it is given: asks its shape, makes an alias, reads or writes values."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # a descriptor


class Use(enum.Enum):
    """METADATA: shape, dtype, device, identity, hooks. ALIAS: another tensor with the same storage. What is not known
    to be one of the others is a READ."""

    METADATA = "metadata"
    ALIAS = "alias"
    READ = "read"
    WRITE = "write"


def _names(names: str) -> frozenset[str]:
    return frozenset(names.split())


_METADATA = _names(
    """
    size numel nelement dim ndimension stride storage_offset element_size dim_order get_device __len__ __hash__ __dir__
    is_floating_point is_complex is_signed is_contiguous is_same_size is_shared is_pinned is_inference is_conj is_neg
    is_set_to data_ptr untyped_storage _typed_storage storage storage_type _is_view _use_count result_type
    can_cast requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook
    empty_like zeros_like ones_like full_like rand_like randn_like randint_like
    new_empty new_empty_strided new_zeros new_ones new_full
    grad backward get_gradient_edge __dlpack_device__
    """
)
# Some of them copy where they must: what they give is an alias if it has the same storage.
_ALIASES = _names(
    """
    __getitem__ adjoint alias as_strided as_subclass broadcast_to chunk conj contiguous cpu cuda detach diagonal dsplit
    expand expand_as flatten hsplit linalg_diagonal moveaxis movedim narrow permute positive ravel reshape reshape_as
    resolve_conj resolve_neg select slice split split_with_sizes squeeze swapaxes swapdims t tensor_split to transpose
    type type_as unbind unflatten unfold unsafe_chunk unsafe_split unsqueeze view view_as view_as_complex view_as_real
    vsplit
    """
)
_ALIAS_ATTRIBUTES = _names("data T mT H mH real imag _base")
_TEMPLATES = _names("to type_as expand_as view_as reshape_as")
"""They read only the shape, dtype or device of their second tensor."""
_OPERATORS = _names("__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ipow__")


def name_of(func: Callable[..., Any]) -> str:
    """The name under which users know a torch function; of an attribute, its name."""
    name: str = getattr(func, "__name__", "an operation")
    if name in ("__get__", "__set__", "__delete__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return f"{name} = ..." if func == DATA else name.partition(".")[0]  # an overload: detach.default


@functools.lru_cache(maxsize=1024)
def kind_of(func: Callable[..., Any]) -> Use:
    """What a torch function does with its first tensor."""
    name, how = name_of(func), getattr(func, "__name__", "")
    if func == DATA:
        return Use.WRITE
    if how == "__get__":
        if not hasattr(torch._C.TensorBase, name):  # a property that gives away the address of the values
            return Use.READ
        return Use.ALIAS if name in _ALIAS_ATTRIBUTES else Use.METADATA
    if how in ("__set__", "__delete__") or name in _METADATA:
        return Use.METADATA
    if name in _ALIASES:
        return Use.ALIAS
    is_in_place = name.endswith("_") and not name.endswith("__")
    return Use.WRITE if is_in_place or name in _OPERATORS else Use.READ


def uses(
    func: Callable[..., Any], args: Any, kwargs: Any, is_guarded: Callable[[Any], bool]
) -> Iterator[tuple[torch.Tensor, Use]]:
    """The guarded tensors among the arguments of a torch function, each with what becomes of it."""
    kind = kind_of(func)
    if kind is Use.METADATA:
        return
    # Some of torch's Python functions hand on all of their arguments by name.
    first = {id(leaf) for leaf in pytree.tree_iter(args[0] if args else kwargs)}
    written = {id(leaf) for leaf in pytree.tree_iter(kwargs["out"])} if "out" in kwargs else ()
    for leaf in pytree.tree_iter((args, kwargs)):
        if is_guarded(leaf):
            if id(leaf) in written:
                yield leaf, Use.WRITE
            elif id(leaf) in first:
                yield leaf, kind
            elif kind is not Use.ALIAS or name_of(func) not in _TEMPLATES:
                yield leaf, Use.READ
