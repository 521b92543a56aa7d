"""What pytest and a worker say to each other, as pickled bytes over a pipe.

Not `Connection.send`: torch teaches its pickler to pass tensors through shared memory, which dies with the sender.
"""

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True)
class Setup:
    """What a worker needs to become rank `rank` of `world_size`."""

    rank: int
    world_size: int
    parent_pid: int
    fd: int
    port: int
    stacks_path: str
    init: bool


@dataclass(frozen=True)
class Job:
    """One call: a module-level function by name; `args` are pickled apart, after the worker's `sys.path` is set."""

    module: str
    name: str
    path: list[str]
    args: bytes


@dataclass(frozen=True)
class Finished:
    """All ranks have replied: what the call left behind can go. There is no reply to this."""


@dataclass(frozen=True)
class Reply:
    """How a call ended on one rank: a pickled value, a traceback, or the reason of a skip."""

    value: bytes | None = None
    error: str | None = None
    skipped: str | None = None


@dataclass(frozen=True)
class Ready:
    """The worker has imported torch and, if asked, joined the process group."""

    start_s: float


def send(connection: Connection, message: Any) -> None:
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())
