"""Weight-only quantization by torchao: the bytes that travel shrink. It is lossy: outputs are not those of the model.

torchao replaces the weight of a linear layer by a tensor subclass of several plain tensors (integers, scales). Each of
them becomes a parameter of its own here (`unwrap_tensor_subclass`), so that units hold and move them as any other.
"""

from __future__ import annotations

from typing import Any

from torch import nn

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
    quantization.quantize_(model, settings)
    unwrap_tensor_subclass(model)
