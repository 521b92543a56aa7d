"""The tensors that hold the values of a model's parameters.

Most parameters hold their values themselves. A quantised one consists of several tensors, and those are what a unit
lays out, gathers and saves, each in its own dtype:

    weight                                  an ordinary parameter
    weight.qdata, weight.scale              a tensor subclass that wraps others (torchao), through `__tensor_flatten__`
    weight, weight.absmax, ...              bitsandbytes in 4 bits: the packed values, and block scales in `quant_state`

Only their `data` is replaced, never the objects, so a wrapper finds its values wherever they are. Inner tensors are
frozen and keep their dtype in every precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardwise.errors import ConfigError


def stored_tensors(model: nn.Module, remove_duplicate: bool = True) -> dict[str, torch.Tensor]:
    """What holds the values of a model's parameters, by name, in the order of `named_parameters`.

    >>> list(stored_tensors(nn.Linear(2, 2)))
    ['weight', 'bias']
    """
    return {
        f"{name}.{part}" if part else name: tensor
        for name, param in model.named_parameters(remove_duplicate=remove_duplicate)
        for part, tensor in stored_in(param, name)
    }


def stored_in(param: torch.Tensor, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """What holds the values of one parameter, each with its path inside of it; "" is the parameter itself."""
    if type(param) is nn.Parameter:
        yield "", param
    elif is_wrapper(param):
        if param.requires_grad:
            raise ConfigError(
                f"parameter {name!r} is a {type(param).__name__} that requires gradients: freeze it "
                "(requires_grad_(False)) and train adapters beside it, or dequantise it before shardwise.initialize"
            )
        yield from _wrapped(param)
    else:
        yield "", param
        yield from _block_scales(param)


def is_wrapper(param: Any) -> bool:
    """Whether the values are in other tensors alone. Those of a DTensor are not whole there."""
    return is_traceable_wrapper_subclass(param) and not hasattr(param, "device_mesh")


def is_quantized(param: Any) -> bool:
    """Whether a parameter means nothing without other tensors: torchao's and bitsandbytes' weights."""
    return type(param) is not nn.Parameter and (
        is_wrapper(param) or any(getattr(param, name, None) is not None for name in ("quant_state", "SCB"))
    )


def loose_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Small tensors that quantised weights keep in addition to their values, and all ranks hold whole."""
    for param in model.parameters():
        if type(param) is not nn.Parameter and not is_wrapper(param):
            offset = getattr(getattr(param, "quant_state", None), "offset", None)
            yield from (each for each in (offset, getattr(param, "SCB", None)) if isinstance(each, torch.Tensor))


def prepare_quantized(model: nn.Module) -> None:
    """Make layers of bitsandbytes read their weights where the parameter is.

    In 8 bits, a layer that has run reads a tensor that it has put aside; that becomes an attribute of the parameter
    again, as it was before the first forward. In 4 bits, a layer in evaluation on the CPU repacks its parameter.
    """
    module: Any
    state: Any
    weight: Any
    for module in model.modules():
        state, weight = getattr(module, "state", None), module._parameters.get("weight")
        if hasattr(weight, "SCB") and getattr(state, "CB", None) is not None:
            weight.CB, weight.SCB, state.CB, state.SCB = state.CB, state.SCB, None, None
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def rebind_copies(param: Any, view: torch.Tensor) -> None:
    """Point the other names of a quantised weight's values at `view`, where the parameter is from now on."""
    if getattr(param, "CB", None) is not None:
        param.CB = view


def _wrapped(outer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name in outer.__tensor_flatten__()[0]:
        inner = getattr(outer, name)
        if is_traceable_wrapper_subclass(inner):
            yield from ((f"{name}.{path}", tensor) for path, tensor in _wrapped(inner))
        else:
            yield name, inner


def _block_scales(param: Any) -> Iterator[tuple[str, torch.Tensor]]:
    state = getattr(param, "quant_state", None)
    for name, of in (("absmax", state), ("nested_absmax", getattr(state, "state2", None))):
        if isinstance(scales := getattr(of, "absmax", None), torch.Tensor):
            yield name, scales
