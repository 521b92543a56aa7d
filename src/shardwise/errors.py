"""The errors and warnings of shardwise. Each message names what was found and what to do about it."""

from __future__ import annotations

import warnings


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


class GradientError(ShardwiseError, RuntimeError):
    """Gradients are read, changed or dropped where the engine holds them, in a way that would have no effect."""


class CompatibilityError(ShardwiseError, NotImplementedError):
    """A program asks DeepSpeed's API for something that shardwise does not do, or asks too late for that API."""


class ShardwiseWarning(UserWarning):
    """Base of all warnings of shardwise."""


class ConfigWarning(ShardwiseWarning):
    """A configuration is valid, but has an effect that its author may not expect."""


class HabitWarning(ShardwiseWarning):
    """A habit from another library has an effect here that its user may not expect."""


class DisagreementError(ShardwiseError, RuntimeError):
    """The ranks do not issue the same operations, or one of them has ended. No rank can continue: restart all."""


class Notices:
    """What an engine has warned of: each matter once, on one rank."""

    def __init__(self, speaks: bool = True) -> None:
        self._speaks = speaks
        self._said: set[str] = set()

    def say(self, matter: str, sentence: str) -> None:
        """Raise a `HabitWarning` with `sentence`, the first time that `matter` comes up."""
        if matter not in self._said:
            self._said.add(matter)
            if self._speaks:
                warnings.warn(sentence, HabitWarning, stacklevel=3)
