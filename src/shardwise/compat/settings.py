"""The classes of DeepSpeed's configuration by name, loaded at first use: `import deepspeed` does not need them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_OFFLOAD = ("DeepSpeedZeroOffloadParamConfig", "DeepSpeedZeroOffloadOptimizerConfig")
_PRECISION = ("DeepSpeedFP16Config", "DeepSpeedBF16Config", "get_float16_config", "get_bfloat16_config")


def _named(*names: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module that has these names."""

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(name)
        from shardwise.compat import setting_models

        return getattr(setting_models, name)

    return find


config_named = _named("DeepSpeedConfig", "get_bfloat16_enabled", "get_fp16_enabled", *_PRECISION)
offload_section_named = _named(*_OFFLOAD)
precision_named = _named(*_PRECISION)
zero_section_named = _named("DeepSpeedZeroConfig", *_OFFLOAD)
