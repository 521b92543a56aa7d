"""The hosts of the ranks, as each rank has learned them at the start: for errors after the store is out of reach."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

from shardwise.comm.judge import name_ranks


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
