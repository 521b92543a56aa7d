"""The classes of `deepspeed.runtime.lr_schedules`, loaded at first use: `import deepspeed` does not need them."""

from __future__ import annotations

from typing import Any

from shardwise.compat.names import VALID_LR_SCHEDULES


def schedule_named(name: str) -> Any:
    """The class of a schedule; loaded at first use."""
    if name not in VALID_LR_SCHEDULES:
        raise AttributeError(f"module 'deepspeed.runtime.lr_schedules' has no attribute {name!r}")
    from shardwise.compat.schedules import schedule_class

    return schedule_class(name)
