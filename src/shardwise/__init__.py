"""shardwise trains models that do not fit: ZeRO as one small mechanism in plain PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwise._version import __version__

if TYPE_CHECKING:
    from shardwise.config import Config
    from shardwise.deferred.deferred import deferred_init
    from shardwise.engine.access import gathered
    from shardwise.engine.ema import ema
    from shardwise.engine.engine import Engine
    from shardwise.engine.initialize import initialize
    from shardwise.errors import ConfigError, DisagreementError, DiskError, ShardwiseError
    from shardwise.inference.start import stream
    from shardwise.observe.analyzer import MemoryAnalyzer
    from shardwise.partition.units import describe_units
    from shardwise.pipelining.pipeline import pipeline
    from shardwise.planning import foresee, plan
    from shardwise.planning.pipelines import foresee_pipeline

# Loaded at first use: `import shardwise` then costs little more than `import torch`.
_MODULES = {
    "Config": "config",
    "ConfigError": "errors",
    "DisagreementError": "errors",
    "DiskError": "errors",
    "Engine": "engine.engine",
    "MemoryAnalyzer": "observe.analyzer",
    "ShardwiseError": "errors",
    "deferred_init": "deferred.deferred",
    "describe_units": "partition.units",
    "ema": "engine.ema",
    "foresee": "planning",
    "foresee_pipeline": "planning.pipelines",
    "gathered": "engine.access",
    "initialize": "engine.initialize",
    "pipeline": "pipelining.pipeline",
    "plan": "planning",
    "stream": "inference.start",
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
    "foresee_pipeline",
    "gathered",
    "initialize",
    "pipeline",
    "plan",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    value = getattr(import_module(f"shardwise.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
