"""What a rank sees of its own main thread and of the processes of other ranks, and what it knows of their hosts.

Each rank learns the hosts at the start: for errors after the store is out of reach.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.distributed import distributed_c10d as c10d

from shardwise.agreement.judge import name_ranks
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


class RankHost(NamedTuple):
    """The host of a rank, and whether the process that holds the store runs there."""

    name: str
    has_store: bool


def this_host(store: Any) -> RankHost:
    """The host of this process."""
    return RankHost(socket.gethostname(), _is_here(getattr(_innermost(store), "host", "")))


def describe_holder(store: Any) -> str:
    """Who holds a store, as far as this process can tell."""
    store = _innermost(store)
    if hasattr(store, "path"):
        return f"the file {store.path}"
    if not hasattr(store, "port"):
        return "this process"
    address = f"{store.host}:{store.port}"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return f"torchrun's agent at {address}"
    return f"rank 0 at {address}" if os.environ.get("MASTER_PORT") == str(store.port) else f"the process at {address}"


def describe_hosts(hosts: Sequence[RankHost], own: int) -> str:
    """A line for each host, with its ranks.

    >>> names = ("a", "b", "b", "c")
    >>> print(describe_hosts([RankHost(name, has_store=name == "a") for name in names], own=2))
      rank 0: on a, where the store is
      ranks 1, 2: on b, this host
      rank 3: on c, which cannot be asked without the store
    """
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host.name, []).append(rank)
    with_store = {host.name for host in hosts if host.has_store}
    lines = []
    for name, numbers in ranks.items():
        others = ", where the store is" if name in with_store else ", which cannot be asked without the store"
        lines.append(f"  {name_ranks(numbers)}: on {name}{', this host' if name == hosts[own].name else others}")
    return "\n".join(lines)


def _innermost(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _is_here(host: str) -> bool:
    """Whether an address is one of this host's: then it is also the sender of what goes there. Sends nothing."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM) if host else ():
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                if probe.getsockname()[0] == address[0]:
                    return True
    return False
