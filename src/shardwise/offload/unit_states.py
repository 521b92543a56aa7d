"""Where a unit's states rest: the interface that its weights, gradients and optimizer see.

ResidentStates   all states rest on the device: nothing travels, every method is trivial
OffloadedStates  some state rests on the host or on a disk, see `offloaded_states`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from shardwise.offload.buckets import BucketUpdate
from shardwise.partition.layout import GroupRun


class UnitStates(ABC):
    """Where one unit's states rest."""

    is_offloaded: bool
    holds_moments = False
    """Whether the optimizer's moments rest off the device."""
    is_streamed = False
    """Whether the update is made while the states travel, instead of where the weights are."""
    updates_on_host = False
    """Whether the host makes the update, from the next step on."""
    pending: BucketUpdate | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes that rest off the device."""
        return 0

    @property
    def disk_bytes(self) -> int:
        """How many of them rest on a disk."""
        return 0

    @abstractmethod
    def __contains__(self, state: str) -> bool:
        """Whether a state rests off the device."""

    @abstractmethod
    def split(self, runs: Sequence[GroupRun]) -> Sequence[GroupRun]:
        """The runs of the optimizer's elements, cut so that each travels at once."""

    @abstractmethod
    def run_update(self) -> None:
        """Issue the pending update now, and order the compute stream after it."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until every state is where it rests."""

    @abstractmethod
    def free(self) -> None:
        """Free the storages, after all that is in flight."""


class ResidentStates(UnitStates):
    """All states rest on the device."""

    is_offloaded = False

    def __contains__(self, state: str) -> bool:
        return False

    def split(self, runs: Sequence[GroupRun]) -> Sequence[GroupRun]:
        return runs

    def run_update(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def free(self) -> None:
        pass
