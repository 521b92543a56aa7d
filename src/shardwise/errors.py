"""The errors that users meet. Each message names what was seen and what to do about it."""

__all__ = ["ConfigError", "ConfigWarning", "ShardwiseError"]


class ShardwiseError(Exception):
    """Base of every error that shardwise raises on purpose."""


class ConfigError(ShardwiseError, ValueError):
    """A configuration that is wrong, contradictory, or asks for something shardwise does not do."""


class ConfigWarning(UserWarning):
    """A configuration that loads, but holds something its author should know about."""
