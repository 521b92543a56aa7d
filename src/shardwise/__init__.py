"""shardwise trains models that do not fit: ZeRO as one small mechanism in plain PyTorch."""

from shardwise._version import __version__

__all__ = ["__version__"]
