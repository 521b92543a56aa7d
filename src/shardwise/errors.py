"""The errors that shardwise raises. Each message names what was found and what to do about it."""


class ShardwiseError(Exception):
    """Base of all errors of shardwise."""


class ConfigError(ShardwiseError, ValueError):
    """A configuration is invalid, contradictory or not supported."""


class CheckpointError(ShardwiseError, ValueError):
    """A checkpoint cannot be written, is missing or damaged, or does not fit the engine."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is missing, cut short or changed."""


class DiskError(ShardwiseError, OSError):
    """State that is offloaded to disk cannot be written, or is not read back as it was written."""


class ConfigWarning(UserWarning):
    """A configuration is valid, but has an effect that its author may not expect."""


class DisagreementError(ShardwiseError, RuntimeError):
    """The ranks do not issue the same operations, or one of them has ended. No rank can continue: restart all."""
