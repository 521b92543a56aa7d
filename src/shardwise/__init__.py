"""shardwise trains models that do not fit: ZeRO as one small mechanism in plain PyTorch."""

from shardwise._version import __version__
from shardwise.access import gathered
from shardwise.config import Config
from shardwise.division import describe_units
from shardwise.engine import Engine
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.start import initialize

__all__ = [
    "Config",
    "ConfigError",
    "Engine",
    "ShardwiseError",
    "__version__",
    "describe_units",
    "gathered",
    "initialize",
]
