"""What a rank sees of its own main thread, and of the processes of other ranks."""

from __future__ import annotations

import sys
import threading

from torch.distributed import distributed_c10d as c10d

from shardwise.machine.local_ranks import recorded_exit
from shardwise.machine.process import Condition, Identity, describe_end

_NEVER_WAIT = ("isend", "irecv")


def outside_call() -> tuple[str, int] | None:
    """The call of torch.distributed in which the main thread waits, if any, and what tells it from the next such call.

    Two calls in a row may have frames of one identity, so a rank that sends all the time could look like one that
    waits. Calls that never wait are known by their names: test_agreement.test_a_rank_that_sends_does_not_wait_outside.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or frame.f_code.co_filename != c10d.__file__ or frame.f_code.co_name in _NEVER_WAIT:
        return None
    name, identity, caller = frame.f_code.co_name, id(frame), frame.f_back
    while caller is not None and caller.f_globals.get("__name__", "").startswith("torch."):
        caller = caller.f_back
    place = f" at {caller.f_code.co_filename}:{caller.f_lineno}" if caller is not None else ""
    return f"{name}{place}", identity


def main_place() -> str:
    """Where the main thread is, in code that is neither torch's nor ours."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("torch", "shardwise"):
        frame = frame.f_back
    return f"at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame is not None else ""


def see_process(rank: int, identity: Identity | None) -> tuple[Condition, str]:
    """The condition of a rank's process, with its signal and its log if they are known."""
    if identity is None:
        return Condition.UNKNOWN, "it has not started"
    condition, text = identity.look()
    if condition is Condition.ENDED and (code := recorded_exit(rank)) is not None:
        text = f"its process ({identity.pid} on {identity.host}) {describe_end(code)}"
    return condition, text + (f"; its output is in {identity.log}" if identity.log else "")
