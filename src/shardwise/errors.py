"""The errors that users meet. Each message names what was seen and what to do about it."""

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ConfigWarning",
    "DamagedError",
    "DisagreementError",
    "DiskError",
    "ShardwiseError",
]


class ShardwiseError(Exception):
    """Base of every error that shardwise raises on purpose."""


class ConfigError(ShardwiseError, ValueError):
    """A configuration that is wrong, contradictory, or asks for something shardwise does not do."""


class CheckpointError(ShardwiseError, ValueError):
    """A checkpoint that cannot be written, is missing or damaged, or does not fit the engine."""


class DamagedError(CheckpointError):
    """A checkpoint of which a file is missing, cut short or changed."""


class DiskError(ShardwiseError, OSError):
    """What rests on the disk cannot be written there, or is not there any more as it was written."""


class ConfigWarning(UserWarning):
    """A configuration that loads, but holds something its author should know about."""


class DisagreementError(ShardwiseError, RuntimeError):
    """The ranks do not issue the same operations, or one of them is gone: none can go on. Start all of them again."""
