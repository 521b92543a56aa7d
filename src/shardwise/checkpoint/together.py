"""Work that all ranks do, and that has failed on all of them if it failed on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from shardwise.comm.comm import Comm
from shardwise.errors import CheckpointError, DamagedError

T = TypeVar("T")


def together(comm: Comm, work: Callable[[], T]) -> list[T]:
    """Every rank's result of `work`, on every rank; a CheckpointError on all ranks if any failed. A collective."""
    value: T | None = None
    failure: Exception | None = None
    try:
        value = work()
    except Exception as error:
        failure = error
    told = None if failure is None else f"rank {comm.rank}: {failure or type(failure).__name__}"
    everyone = comm.share_object((value, told, isinstance(failure, DamagedError)), "checkpoint")
    failed = [(message, damaged) for _, message, damaged in everyone if message is not None]
    if failed:
        kind = DamagedError if all(damaged for _, damaged in failed) else CheckpointError
        raise kind("; ".join(message for message, _ in failed)) from failure
    return [value for value, _, _ in everyone]


def first(comm: Comm, work: Callable[[], T]) -> T:
    """Rank 0's result of `work`, on every rank; the others do nothing. A collective."""
    return cast(T, together(comm, lambda: work() if comm.rank == 0 else None)[0])
