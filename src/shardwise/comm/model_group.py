"""The ranks that hold one copy of the model together: the tp axis of a mesh, next to ZeRO's data-parallel group.

These ranks see the same batch, and each holds a part of some tensors (see `partition.dtensors`). ZeRO's gathers and
reductions never go over this group. What has to be known over both axes does: the gradient norm, and so clipping and
skipped steps, and who writes what of a checkpoint.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardwise.errors import ShardwiseError


class DataGroup(Protocol):
    """What `Everyone` needs of a `Comm`."""

    rank: int
    world_size: int
    model_group: ModelGroup

    def share_object(self, value: Any, name: str = "object") -> list[Any]: ...

    @property
    def has_failed(self) -> bool: ...


class ModelGroup:
    """The `group` of one axis, torch's, or None for this rank alone. `rank` and `size` are those in it."""

    def __init__(self, group: dist.ProcessGroup | None = None, rank: int = 0, size: int = 1) -> None:
        self.group: Any = group
        self.rank = rank
        self.size = size

    @classmethod
    def of(cls, mesh: Any) -> ModelGroup:
        """The group of a one-dimensional mesh, or of this rank alone for None."""
        return cls() if mesh is None else cls(mesh.get_group(), mesh.get_local_rank(), mesh.size())

    def share(self, values: torch.Tensor) -> torch.Tensor:
        """A few values of every rank, on every rank: shape [size, *values.shape]."""
        if self.size == 1:
            return values[None]
        everyone = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(everyone, values.contiguous(), group=self.group)
        return torch.stack(everyone)

    def share_object(self, value: Any) -> list[Any]:
        """A small picklable value of every rank, on every rank."""
        everyone = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(everyone, value, group=self.group)
        return everyone

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy the first rank's values to every rank."""
        if self.size > 1 and tensor.numel():
            dist.broadcast(tensor, group=self.group, group_src=0)


class Everyone:
    """All ranks of all axes, numbered by place in the pipeline first, then by data-parallel rank.

    `stages` is the group of a pipeline, whose ranks have other stages of the model.
    """

    def __init__(self, comm: DataGroup, stages: ModelGroup | None = None) -> None:
        self._comm = comm
        self._model = comm.model_group
        self._stages = stages or ModelGroup()
        here = comm.world_size * self._model.size
        self.rank = self._stages.rank * here + comm.rank * self._model.size + self._model.rank
        self.world_size = self._stages.size * here

    def share_object(self, value: Any, name: str = "object") -> list[Any]:
        """A small picklable value of every rank, on every rank, in order."""
        rows = self._comm.share_object(self._model.share_object(value), name)
        here = [each for row in rows for each in row]
        return [each for stage in self._stages.share_object(here) for each in stage]

    def fail_together(self, failure: Exception | None, name: str) -> None:
        """Raise this rank's failure, or an error of the same class that names the ranks that failed. A collective."""
        kind = type(failure) if isinstance(failure, ShardwiseError) else RuntimeError
        shared = self.share_object(None if failure is None else (kind, f"rank {self.rank}: {failure}"), name)
        if failure is not None:
            raise failure
        if others := [each for each in shared if each is not None]:
            raise others[0][0]("; ".join(text for _, text in others))

    @property
    def has_failed(self) -> bool:
        return self._comm.has_failed
