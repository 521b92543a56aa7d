"""Weight-only quantization by torchao: the bytes that travel shrink. It is lossy: outputs are not those of the model.

torchao replaces the weight of a linear layer by a tensor subclass of several plain tensors (integers, scales). Each of
them becomes a parameter of its own here (`unwrap_tensor_subclass`), so that units hold and move them as any other.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardwise.errors import ConfigError

QUANTIZED = ("int8", "int4")
"""What `precision` may be besides the dtypes of floating-point numbers."""


def quantize(model: nn.Module, precision: str) -> None:
    """Quantize the weights of all linear layers in place."""
    try:
        from torchao import quantization  # type: ignore[import-not-found]  # an extra
        from torchao.utils import unwrap_tensor_subclass  # type: ignore[import-not-found]  # as above
    except ImportError:
        raise ConfigError(
            f"precision={precision!r} quantizes with torchao, which is not installed: pip install "
            "'shardwise[quantized]', or take bf16"
        ) from None
    if not any(isinstance(module, nn.Linear) for module in model.modules()):
        raise ConfigError(f"precision={precision!r} quantizes nn.Linear, and the model has none: take bf16")
    settings: Any = quantization.Int8WeightOnlyConfig() if precision == "int8" else quantization.Int4WeightOnlyConfig()
    try:
        quantization.quantize_(model, settings)
    except (ImportError, NotImplementedError, AssertionError) as error:  # kernels that this machine lacks
        raise ConfigError(
            f"torchao cannot make {precision} weights here ({error}): install what it names, or take "
            + ("bf16" if precision == "int8" else "int8 or bf16")
        ) from error
    if not any(is_traceable_wrapper_subclass(param) for param in model.parameters()):
        raise ConfigError(
            f"torchao has quantized no layer to {precision}, because no width is a multiple of its groups "
            f"({getattr(settings, 'group_size', None)}): take bf16"
        )
    unwrap_tensor_subclass(model)
