"""shardwise trains models that do not fit: ZeRO as one small mechanism in plain PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwise._version import __version__

if TYPE_CHECKING:
    from shardwise.access import gathered
    from shardwise.analyzer import MemoryAnalyzer
    from shardwise.averages import ema
    from shardwise.config import Config
    from shardwise.deferred import deferred_init
    from shardwise.division import describe_units
    from shardwise.engine import Engine
    from shardwise.errors import ConfigError, DisagreementError, DiskError, ShardwiseError
    from shardwise.planning import plan
    from shardwise.planning.runs import foresee
    from shardwise.start import initialize

# Loaded at first use: `import shardwise` then costs little more than `import torch`.
_HOMES = {
    "Config": "config",
    "ConfigError": "errors",
    "DisagreementError": "errors",
    "DiskError": "errors",
    "Engine": "engine",
    "MemoryAnalyzer": "analyzer",
    "ShardwiseError": "errors",
    "deferred_init": "deferred",
    "describe_units": "division",
    "ema": "averages",
    "foresee": "planning",
    "gathered": "access",
    "initialize": "start",
    "plan": "planning",
}

__all__ = [
    "Config",
    "ConfigError",
    "DisagreementError",
    "DiskError",
    "Engine",
    "MemoryAnalyzer",
    "ShardwiseError",
    "__version__",
    "deferred_init",
    "describe_units",
    "ema",
    "foresee",
    "gathered",
    "initialize",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    value = getattr(import_module(f"shardwise.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
