"""How process groups end: NCCL groups whose errors are left to the agreement of ranks, and any group at exit.

By default torch's watchdog ends the process as soon as a communicator fails, before the error can name the rank that
died; where it is told not to, it still holds the process for a minute to write its own record. So our groups are made
without either, and aborted together by one thread each. A group that has failed is never destroyed: its destructor
holds Python's lock while it waits for a thread that waits for that lock (tests/test_deaths_gpu.py).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shardwise.machine.process import start_thread

ABORT_S = 30.0
END_S = 10.0
"""How long the end of a process may wait for a group to be destroyed."""
_WAKING_TAG = 0x7FFFFFFF
_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",  # the watchdog sleeps four times as long after an error
}


def set_timeout(group: Any, timeout_s: float) -> None:
    """Give a group, or with None the world, another timeout. Groups that are made from it for an engine get it too."""
    c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


@contextlib.contextmanager
def errors_left_to_us() -> Iterator[None]:
    """Within it, new NCCL groups get a watchdog that only reports errors, unless the user has configured it."""
    ours = {name: value for name, value in _SETTINGS.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


def abort(groups: Sequence[Any]) -> None:
    """Abort groups side by side: an abort waits for the device, where the kernels of the other groups never end."""
    for group in {*groups, dist.group.WORLD}:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # its destructor never runs, not even at exit
    threads = [start_thread(_abort, group, name="shardwise-abort") for group in groups]
    for thread in threads:
        thread.join(ABORT_S)


def break_off(groups: Sequence[Any]) -> None:
    """End all waits in these groups, on this rank and on the others, because no rank can continue."""
    over_nccl = [group for group in groups if "nccl" in str(dist.get_backend_config(group)).lower()]
    if over_nccl:
        abort(over_nccl)
    for group in groups:
        if group not in over_nccl:
            break_connections(group)


def break_connections(group: Any) -> None:
    """As `break_off`, for a group over Gloo.

    A receive that times out breaks all connections of the group, which ends every wait on them. A receive over a
    connection that its rank has closed already breaks nothing, so each rank is tried.
    """
    for step in range(1, group.size()):
        other = (group.rank() + step) % group.size()
        with contextlib.suppress(RuntimeError):
            receive = dist.irecv(torch.empty(1), group=group, group_src=other, tag=_WAKING_TAG)
            assert receive is not None
            receive.wait(timedelta(milliseconds=1))


def _abort(group: Any) -> None:
    with contextlib.suppress(RuntimeError):
        group.abort()


def end_groups(groups: Sequence[Any]) -> None:
    """Destroy groups in limited time, or end the process: a thread inside torch while the interpreter ends would abort
    it."""

    def work() -> None:
        for group in groups:
            with contextlib.suppress(Exception):  # destroyed already, or a rank that has ended closed the connections
                dist.destroy_process_group(group)

    ending = threading.Thread(target=work, daemon=True)
    ending.start()
    ending.join(END_S)
    if ending.is_alive():
        print(f"shardwise: another rank has not left the process group after {END_S:g} s", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)


def end_world_at_exit() -> None:
    """Destroy the default process group when this process exits normally, if it is still the one of now. NCCL warns of
    one that is not destroyed."""
    atexit.register(_end_world, dist.group.WORLD, os.getpid())


def _end_world(group: dist.ProcessGroup | None, owner: int) -> None:
    # Not in a forked child, whose parent still uses the group, and not after an exception: other ranks may be blocked
    # in a collective, and communicators wait for them.
    is_left_alone = os.getpid() != owner or getattr(sys, "last_value", None) is not None
    if not is_left_alone and dist.is_initialized() and dist.group.WORLD is group:
        end_groups([group])
