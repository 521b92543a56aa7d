"""The public object that ties the layers together."""

from shardwise.engine.engine import Engine

__all__ = ["Engine"]
