"""Whether the disks have room for the files of all ranks that use them: each rank alone would count the same room."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from shardwise.sizes import format_bytes


class DiskDemand(NamedTuple):
    """What one rank needs on one disk, and what is free there before any rank has reserved anything.

    `disk` is the host's name and the number of the file system.
    """

    disk: tuple[str, int]
    folder: str
    needed_bytes: int
    free_bytes: int


def shortage(demands: Sequence[Sequence[DiskDemand]], rank: int) -> str | None:
    """Why the files of `rank` have no room, from the demands of every rank; None if they have.

    >>> each = [DiskDemand(("here", 1), "/nvme", 6000, 8000)]
    >>> shortage([each], 0)
    >>> "the 2 ranks that use this disk need 12kB together, and 8kB are free" in shortage([each, each], 1)
    True
    """
    users: defaultdict[tuple[str, int], list[tuple[int, DiskDemand]]] = defaultdict(list)
    for number, own in enumerate(demands):
        for demand in own:
            users[demand.disk].append((number, demand))
    for uses in users.values():
        mine = [demand for number, demand in uses if number == rank]
        total, free = sum(demand.needed_bytes for _, demand in uses), min(demand.free_bytes for _, demand in uses)
        if mine and total > free:
            count = len({number for number, _ in uses})
            together = f", the {count} ranks that use this disk need {format_bytes(total)} together" * (count > 1)
            return (
                f"{mine[0].folder} has too little free space: this rank needs "
                f"{format_bytes(sum(demand.needed_bytes for demand in mine))}{together}, and {format_bytes(free)} are "
                "free; free some, or set offload.nvme_path to a folder on another disk"
            )
    return None
