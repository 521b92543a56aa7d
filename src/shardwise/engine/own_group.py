"""The process group that `initialize` made is destroyed when the interpreter ends. NCCL warns of one that is not."""

from __future__ import annotations

import atexit
import os
import sys

import torch.distributed as dist

from shardwise.comm.groups import end_groups


def end_group_at_exit() -> None:
    """Destroy the default process group when this process exits normally, if it is still the one of now."""
    atexit.register(_destroy, dist.group.WORLD, os.getpid())


def _destroy(group: dist.ProcessGroup | None, owner: int) -> None:
    # Not in a forked child, whose parent still uses the group, and not after an exception: other ranks may be blocked
    # in a collective, and communicators wait for them.
    is_left_alone = os.getpid() != owner or getattr(sys, "last_value", None) is not None
    if not is_left_alone and dist.is_initialized() and dist.group.WORLD is group:
        end_groups([group])
