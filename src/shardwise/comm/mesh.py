"""The mesh that the ranks span, parsed: which ranks ZeRO acts over, which axes it leaves alone, and its nodes.

A mesh has any of the axes `pp, dp_replicate, dp_shard, sp, tp` (`dp` for `dp_shard`, `cp` for `sp`). ZeRO's group is
dp_replicate x dp_shard x sp. Ranks of one tp or pp group hold different parameters and never take part in its gathers
and reductions.
"""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.config.sections import MeshSection
from shardwise.config.shape import NodeShape, shape_on_nodes
from shardwise.errors import ConfigError, ConfigWarning

NAMES = ("pp", "dp_replicate", "dp_shard", "sp", "tp")
_ZERO = ("dp_replicate", "dp_shard", "sp")
_ALIASES = {"dp": "dp_shard", "cp": "sp"}
_EXPECTED = "expected some of pp, dp_replicate, dp_shard (or dp), sp (or cp) and tp"


@dataclass(frozen=True)
class RankMesh:
    """The axes of the ranks.

    sizes        of each axis that there is, outermost first
    members      the ranks of every ZeRO group of the world, if this mesh has all ranks; else nothing is known of others
    group        ZeRO's group where the user's mesh has made it, and is all that is known
    device_mesh  what it was parsed from
    """

    sizes: dict[str, int]
    members: tuple[tuple[int, ...], ...]
    group: dist.ProcessGroup | None = None
    device_mesh: DeviceMesh | None = None

    @classmethod
    def of_world(cls) -> RankMesh:
        """All ranks in one axis."""
        return cls({"dp_shard": dist.get_world_size()}, (tuple(range(dist.get_world_size())),))

    @classmethod
    def parse(cls, mesh: Any) -> RankMesh:
        """A mesh of the user's: with names, the whole mesh; of one dimension, also a part of a larger one."""
        check_is_mesh(mesh)
        names = tuple(_ALIASES.get(name, name) for name in mesh.mesh_dim_names or ())
        _check_names(mesh, names)
        is_world = mesh.mesh.numel() == dist.get_world_size()
        if not is_world and mesh.ndim > 1:
            raise ConfigError(
                f"the mesh has {mesh.mesh.numel()} of {dist.get_world_size()} ranks in {mesh.ndim} dimensions: pass "
                "the whole mesh, or its axis for data parallelism, mesh['dp']"
            )
        sizes = dict(zip(names or ("dp_shard",), mesh.mesh.shape, strict=True))
        if not is_world:
            return cls(sizes, (), mesh.get_group(), mesh)
        dims = [names.index(name) for name in _ZERO if name in names] if names else [0]
        others = [dim for dim in range(mesh.ndim) if dim not in dims]
        ranks = mesh.mesh.permute(*others, *dims).reshape(-1, math.prod(mesh.mesh.shape[dim] for dim in dims))
        members = tuple(map(tuple, ranks.tolist()))
        for own in members:
            # torch numbers the ranks of a group in ascending order: another order would mix their shards up.
            if mesh.ndim > 1 and list(own) != sorted(own):
                raise ConfigError(
                    f"the data-parallel ranks of the mesh are {list(own)}, which do not ascend: put dp_replicate "
                    "before dp_shard and dp_shard before sp in mesh_dim_names, over ranks in their order, as "
                    "init_device_mesh makes them"
                )
        return cls(sizes, members, None, mesh)

    @property
    def is_world(self) -> bool:
        """Whether ZeRO's group is all ranks."""
        return len(self.members) == 1

    @property
    def zero_ranks(self) -> list[int]:
        """The ranks of this process's ZeRO group, as numbers of the world."""
        if self.group is not None:
            return dist.get_process_group_ranks(self.group)
        return next(list(ranks) for ranks in self.members if dist.get_rank() in ranks)

    def axis(self, name: str) -> DeviceMesh | None:
        """An axis such as "tp" or "pp"; None where there is no such axis."""
        return None if self.device_mesh is None or self.sizes.get(name, 1) == 1 else self.device_mesh[name]

    def group_of(self, name: str) -> dist.ProcessGroup | None:
        """The process group of an axis; None where there is no such axis."""
        axis = self.axis(name)
        return None if axis is None else axis.get_group()

    def check_model(self, tp: DeviceMesh | None) -> None:
        """Refuse a model whose parameters are DTensors over other ranks (`tp`) than those of the tp axis."""
        cut = tp.mesh.flatten().tolist() if tp is not None else [dist.get_rank()]
        common = sorted(set(self.zero_ranks) & set(cut))
        if len(common) > 1:
            raise ConfigError(
                f"ranks {common} are in the data-parallel mesh and hold different parts of the model (its parameters "
                "are DTensors over them): pass the axis across which the model is the same, mesh['dp']"
            )
        group = self.group_of("tp")
        axis = dist.get_process_group_ranks(group) if group is not None else [dist.get_rank()]
        if tp is not None and self.members and axis != cut:
            raise ConfigError(
                f"the parameters of the model are DTensors over the ranks {cut}, and the tp axis of the mesh has {axis}"
                ": cut the model over mesh['tp'], or give the mesh the tp axis that the model is cut over"
            )
        if tp is None and len(axis) > 1 and dist.get_rank() == 0:
            warnings.warn(
                f"the mesh has a tp axis of {len(axis)} ranks, and no parameter of the model is a DTensor: nothing is "
                "cut, and each of these ranks trains a model of its own. Cut it over mesh['tp'] (parallelize_module, "
                "or shardwise.models.tensor_parallel), or leave tp out of the mesh",
                ConfigWarning,
                stacklevel=4,
            )

    def shape(self, ranks_per_node: int | None) -> NodeShape:
        """The nodes of ZeRO's group: what the configuration says, the mesh's dp_replicate, or else as launched."""
        ranks = self.zero_ranks
        if ranks_per_node is not None:
            if len(ranks) % ranks_per_node:
                raise ConfigError(
                    f"communication.ranks_per_node is {ranks_per_node}, and ZeRO has {len(ranks)} ranks, which are not "
                    "nodes of that size: take a divisor, or leave it out"
                )
            return NodeShape(len(ranks) // ranks_per_node, ranks_per_node)
        if "dp_replicate" in self.sizes:
            return NodeShape(self.sizes["dp_replicate"], len(ranks) // self.sizes["dp_replicate"])
        return shape_on_nodes(ranks, int(os.environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size()))


def make_mesh(section: MeshSection, device: torch.device) -> RankMesh:
    """The mesh that a configuration describes, over all ranks of the world."""
    sizes: dict[str, int | None] = {name: getattr(section, name) for name in NAMES}
    if section.dp_replicate is None:
        del sizes["dp_replicate"]
    world_size = dist.get_world_size()
    given = math.prod(size for size in sizes.values() if size is not None)
    if world_size % given or (section.dp_shard is not None and given != world_size):
        listed = " x ".join(f"{name} {size}" for name, size in sizes.items() if size not in (None, 1))
        raise ConfigError(
            f"mesh: {listed or 'its axes'} = {given} ranks, and there are {world_size}: change an axis, leave dp_shard "
            f"out to have it derived, or start a multiple of {given} ranks"
        )
    sizes["dp_shard"] = section.dp_shard or world_size // given
    names = [name for name, size in sizes.items() if size != 1 or name in ("dp_replicate", "dp_shard")]
    if names == ["dp_shard"]:
        return RankMesh.of_world()
    return RankMesh.parse(
        init_device_mesh(device.type, tuple(sizes[name] or 1 for name in names), mesh_dim_names=tuple(names))
    )


def mesh_beside(tp: DeviceMesh) -> DeviceMesh:
    """The mesh of all ranks, with the axes dp and tp. `tp` is the mesh of those that hold this rank's copy of a model.

    Ranks of one copy are neighbours, as in `init_device_mesh(device, (W // tp, tp), mesh_dim_names=("dp", "tp"))`.
    """
    ranks, size, world_size = tp.mesh.flatten().tolist(), tp.size(), dist.get_world_size()
    first = ranks[0]
    if world_size % size or first % size or ranks != list(range(first, first + size)):
        raise ConfigError(
            f"the model is cut over the ranks {ranks} of {world_size}, which are not a row of neighbours: pass the "
            "data-parallel axis of your mesh, shardwise.initialize(..., mesh=mesh['dp'])"
        )
    return init_device_mesh(tp.device_type, (world_size // size, size), mesh_dim_names=("dp", "tp"))


def check_is_mesh(mesh: Any) -> None:
    """Refuse what is no DeviceMesh."""
    if not hasattr(mesh, "mesh_dim_names"):
        raise ConfigError(
            f"mesh is {mesh!r}: pass a DeviceMesh, such as init_device_mesh(device, (2, 4), mesh_dim_names=('dp', "
            "'tp'))"
        )
    if mesh.get_coordinate() is None:
        raise ConfigError(
            f"rank {dist.get_rank()} of {dist.get_world_size()} is not in the mesh: start as many ranks as the mesh "
            "has, or make a mesh of all of them"
        )


def _check_names(mesh: Any, names: tuple[str, ...]) -> None:
    if not names and mesh.ndim > 1:
        raise ConfigError(
            f"the mesh has {mesh.ndim} dimensions without names: {_EXPECTED}, as mesh_dim_names of init_device_mesh"
        )
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ConfigError(f"the mesh has an axis {unknown[0]!r}: {_EXPECTED}, as mesh_dim_names of init_device_mesh")
    for alias, name in _ALIASES.items():
        if names.count(name) > 1:
            raise ConfigError(f"the mesh has both {alias} and {name}, which are one axis: rename one, or join them")
    is_world = mesh.mesh.numel() == dist.get_world_size()
    if names and not is_world and not set(names) & set(_ZERO):
        raise ConfigError(
            f"the mesh is the axis {names[0]!r}, whose ranks hold different parameters: pass the whole mesh, or its "
            "axis for data parallelism, mesh['dp']"
        )
