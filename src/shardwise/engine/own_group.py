"""The process group that `initialize` made is destroyed when the interpreter ends. NCCL warns of one that is not."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading

import torch.distributed as dist

MOST_S = 10.0
"""How long the end of a process may wait for it."""


def end_group_at_exit() -> None:
    """Destroy the default process group when this process exits normally, if it is still the one of now."""
    atexit.register(_destroy, dist.group.WORLD, os.getpid())


def _destroy(group: dist.ProcessGroup | None, owner: int) -> None:
    # Not in a forked child, whose parent still uses the group, and not after an exception: other ranks may be blocked
    # in a collective, and communicators wait for them.
    if os.getpid() != owner or getattr(sys, "last_value", None) is not None:
        return
    if not dist.is_initialized() or dist.group.WORLD is not group:
        return

    def work() -> None:
        with contextlib.suppress(Exception):  # a rank that has ended already closed the connections
            dist.destroy_process_group()

    ending = threading.Thread(target=work, daemon=True)
    ending.start()
    ending.join(MOST_S)
    if ending.is_alive():
        print(f"shardwise: another rank has not left the process group after {MOST_S:g} s", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)  # a thread inside torch while the interpreter ends would abort the process
