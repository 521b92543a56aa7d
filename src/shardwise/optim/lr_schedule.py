"""The learning-rate scheduler that `engine.step()` steps: which can be given, and whether the loop steps it too."""

from __future__ import annotations

import inspect
from typing import Any

from shardwise.errors import ConfigError, Notices


def check_scheduler(scheduler: Any) -> None:
    """Refuse a scheduler whose step needs more than the engine knows."""
    arguments = inspect.signature(scheduler.step).parameters.values()
    needed = [each.name for each in arguments if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    if needed:
        kind = type(scheduler).__name__
        raise ConfigError(
            f"lr_scheduler {kind}: its step needs {', '.join(needed)}, which engine.step() does not have: leave "
            f"lr_scheduler out, build the {kind} on engine.optimizer, and call its step yourself"
        )


class SchedulerSteps:
    """Steps a scheduler, and says if the user's loop steps it as well."""

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self._count: int | None = None
        self._doubled = 0

    def step(self, scheduler: Any) -> None:
        """After an update."""
        # Twice in a row: a single jump may be a state that was loaded, or a step that is meant.
        is_ahead = self._count is not None and getattr(scheduler, "_step_count", None) == self._count + 1
        self._doubled = self._doubled + 1 if is_ahead else 0
        if self._doubled == 2:
            self._notices.say(
                "scheduler stepped twice",
                "the lr_scheduler that was given to shardwise.initialize is stepped by engine.step(), and the training "
                "loop steps it too, so it advances twice a step: remove scheduler.step() from the loop, or leave "
                "lr_scheduler out of shardwise.initialize",
            )
        scheduler.step()
        self._count = getattr(scheduler, "_step_count", None)
