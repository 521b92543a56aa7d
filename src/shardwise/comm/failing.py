"""The failure of one rank, raised on all of them."""

from __future__ import annotations

from shardwise.comm.interface import Comm
from shardwise.errors import ShardwiseError


def fail_together(failure: Exception | None, comm: Comm, name: str) -> None:
    """Raise this rank's failure, or an error of the same class that names the ranks that failed. A collective."""
    kind = type(failure) if isinstance(failure, ShardwiseError) else RuntimeError
    everyone = comm.everyone
    shared = everyone.share_object(None if failure is None else (kind, f"rank {everyone.rank}: {failure}"), name)
    if failure is not None:
        raise failure
    if others := [each for each in shared if each is not None]:
        raise others[0][0]("; ".join(text for _, text in others))
