"""The errors and warnings of shardwise. Each message names what was found and what to do about it."""

from __future__ import annotations

import warnings


class ShardwiseError(Exception):
    """Base of all errors of shardwise."""


class ConfigError(ShardwiseError, ValueError):
    """A configuration is invalid, contradictory or not supported.

    `shardwise config FILE` shows what a configuration means, key by key, and `shardwise COMMAND --help` what an option
    takes.
    """


class CheckpointError(ShardwiseError, ValueError):
    """A checkpoint cannot be written, is missing or damaged, or does not fit the engine.

    `shardwise inspect FOLDER` shows what a checkpoint holds. If it is damaged, load an older one (`tag=`, or
    `fallback=True` for the newest that is complete); if it does not fit, build the model and the optimizer it was saved
    with.
    """


class DamagedError(CheckpointError):
    """A file of a checkpoint is missing, cut short or changed."""


class DiskError(ShardwiseError, OSError):
    """A file cannot be written, or state that is offloaded to disk is not read back as it was written.

    Free room on the disk that is named, or name another one. What is not read back as it was written is a fault of the
    disk: load the last checkpoint on another one.
    """


class ModelChangedError(ShardwiseError, RuntimeError):
    """The model was changed under its engine in a way that the engine cannot follow.

    Change the model first, then call `shardwise.initialize`.
    """


class NotGatheredError(ShardwiseError, RuntimeError):
    """The values of a parameter are used where this rank has only its shard of them, or none.

    `with shardwise.gathered(params):` gathers them, on all ranks together; `engine.full_param(name)` gives a copy.
    """


class GradientError(ShardwiseError, RuntimeError):
    """Gradients are read, changed or dropped where the engine holds them, in a way that would have no effect.

    `engine.full_grad(name)` reads one, `engine.register_grad_hook` changes them, `engine.clip_grad_norm_` clips them.
    """


class CompatibilityError(ShardwiseError, NotImplementedError):
    """A program asks DeepSpeed's API for something that shardwise does not do, or asks too late for that API.

    docs/clients.md says how to start such a program, and docs/from-deepspeed.md what differs.
    """


class ShardwiseWarning(UserWarning):
    """Base of all warnings of shardwise."""


class ConfigWarning(ShardwiseWarning):
    """A configuration is valid, but has an effect that its author may not expect.

    If the effect is meant, `warnings.filterwarnings("ignore", category=shardwise.errors.ConfigWarning)` silences it.
    """


class HabitWarning(ShardwiseWarning):
    """A habit from another library has an effect here that its user may not expect.

    Each is said once, on rank 0.
    """


class DisagreementError(ShardwiseError, RuntimeError):
    """The ranks do not issue the same operations, or one of them has ended.

    No rank can continue: end them all, mend the cause, and restart from the last checkpoint.
    """


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
