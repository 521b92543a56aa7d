"""How a device uses memory: rounding, workspaces, and operators of its own.

A dry run works on fake CPU tensors, whatever device it foresees. Most operators allocate the same on both. Those that
do not are replaced by the ones that CUDA runs, and the scratch memory of CUDA kernels is added.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F


@dataclass(frozen=True)
class Kernels:
    """A kind of device.

    granularity_bytes  its allocator rounds storages up to a multiple of this
    overhead_bytes     workspaces that its libraries allocate at the first matrix product and keep
    replaced           functions of `torch.nn.functional` that it computes with other operators
    scratch            from the arguments of an operator to the bytes that its kernel allocates while it runs
    """

    name: str
    granularity_bytes: int = 1
    overhead_bytes: int = 0
    replaced: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    scratch: Mapping[Any, Callable[..., int]] = field(default_factory=dict)


@contextlib.contextmanager
def replacing(replaced: Mapping[str, Callable[..., Any]], of: Any = F) -> Iterator[None]:
    """Replace functions of a module inside the context, by default of `torch.nn.functional`.

    A torch function mode would not do: it is off in what checkpoints recompute inside a backward.
    """
    originals = {name: getattr(of, name) for name in replaced}
    for name, function in replaced.items():
        setattr(of, name, function)
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(of, name, function)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """CUDA's choice: the flash kernel in 16 bits without a mask, otherwise the memory-efficient one."""
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    if is_half and attn_mask is None and query.shape[-1] <= 256:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return _first(flash(query, key, value, dropout_p, is_causal, scale=scale))
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return _first(efficient(query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, scale=scale))


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """One fused kernel that keeps a mask of one byte per element."""
    return _first(torch.native_dropout(input, p, True)) if training and p else input


_COMPOSED_RMS_NORM = F.rms_norm


class _RmsNorm(torch.autograd.Function):
    """Allocates and keeps what CUDA's fused kernel does; on the CPU the operator is composed of others."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, dims: int, weight: torch.Tensor | None) -> torch.Tensor:
        inverse = input.new_empty(input.shape[:-dims], dtype=torch.float32)
        ctx.save_for_backward(input, inverse, *([] if weight is None else [weight]))
        return input.clone()  # like the kernel, reads once and writes once

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        input, _, *weights = ctx.saved_tensors
        return input + grad, None, torch.empty_like(weights[0]) if weights else None


def _rms_norm(
    input: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """Fused if input and weight have the same dtype."""
    if weight is not None and weight.dtype != input.dtype:
        return _COMPOSED_RMS_NORM(input, normalized_shape, weight, eps)
    out: torch.Tensor = _RmsNorm.apply(input, len(normalized_shape), weight)  # type: ignore[no-untyped-call]  # torch
    return out


def _first(outputs: Any) -> torch.Tensor:
    """The result of a fused operator, without what it keeps for its backward."""
    out: torch.Tensor = outputs[0]
    return out


def _flash_backward_bytes(grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *rest: Any, **named: Any) -> int:
    """The fp32 sum of the query's gradient, and one number per row."""
    batch, heads, length, size = query.shape
    rounded = -(-length // 128) * 128
    wide = -(-size // 32) * 32
    repeated = 2 * (heads // key.shape[1]) * key.nbytes if heads != key.shape[1] else 0
    return int(batch * heads * rounded * (4 * wide + 4) + repeated)


CPU = Kernels("cpu")
CUBLAS_BYTES = 2 * 32 << 20
"""cuBLAS keeps one workspace for the thread of the forward and one for that of the backward, on Hopper and later of
32 MiB each, before of about 8 MiB."""


CUDA = Kernels(
    name="cuda",
    granularity_bytes=512,  # of torch's allocator
    overhead_bytes=CUBLAS_BYTES,
    replaced={"scaled_dot_product_attention": _attention, "dropout": _dropout, "rms_norm": _rms_norm},
    scratch={torch.ops.aten._scaled_dot_product_flash_attention_backward.default: _flash_backward_bytes},
)


def kernels_for(device: str | None) -> Kernels:
    """The kernels of a device by name; for None, a GPU's if this process has one."""
    is_cuda = torch.cuda.is_available() if device is None else device.startswith("cuda")
    return CUDA if is_cuda else CPU
