"""What is decided about a unit before it is built: its layout, its policy, and how its gradients are reduced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from shardwise.comm import Comm
from shardwise.comm.model_group import ModelGroup
from shardwise.config.shape import NodeShape, Sharding
from shardwise.memory.reduce_plan import GradSizes, ReducePlan, sum_block_numel
from shardwise.partition import Layout, Policy
from shardwise.partition.dtensors import local, part_of
from shardwise.partition.layout import Cut, TensorSpec
from shardwise.partition.policy import Group
from shardwise.partition.units import UnitSpec


@dataclass(frozen=True)
class UnitPlan:
    """One unit before it is built."""

    spec: UnitSpec
    layout: Layout
    policy: Policy
    shape: NodeShape
    reduce_plan: ReducePlan = field(default_factory=ReducePlan)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def owned_numel(self) -> int:
        """How many elements a rank updates."""
        return self.part_numel(self.policy.optim_cut)

    def part_numel(self, sharding: Sharding) -> int:
        """How many elements a rank holds of what is cut in this way."""
        return self.layout.numel // self.shape.parts(sharding)

    def grad_sizes(self, comm: Comm) -> GradSizes:
        """What the unit's gradients take, for the choice of the reduce plan."""
        layout, policy = self.layout, self.policy
        item = policy.grad_dtype.itemsize
        row = layout.shard_numel * policy.reduce_dtype.itemsize
        held_numel = self.part_numel("node" if policy.grads_cut == "node" else "sharded")
        is_exact = policy.reduce_dtype == torch.float32  # summed in place, without a block beside
        is_resident = policy.grads_tier == "device"
        return GradSizes(
            full=layout.numel * item,
            rested=layout.numel * policy.accumulate_dtype.itemsize,
            largest=max((slot.span.numel for slot in layout.slots), default=0) * item,
            held=held_numel * policy.accumulate_dtype.itemsize if is_resident else 0,  # else it leaves at once
            sent=row * comm.world_size,
            received=row * self._received_rows(comm),
            shard_numel=held_numel,
            block_numel=0 if is_exact else sum_block_numel(held_numel, comm.kernels),
        )

    def _received_rows(self, comm: Comm) -> int:
        """What the exchanges of all hops receive, in shards."""
        rows, parts = 0, comm.world_size
        for hop in comm.hops():
            parts //= hop.size
            rows += comm.rows_received(hop) * parts
        return rows


def layout_for(
    spec: UnitSpec,
    params: Mapping[str, torch.Tensor],
    groups: Mapping[str, Group],
    policy: Policy,
    world_size: int,
    tp: ModelGroup,
) -> Layout:
    """The layout of a unit; `groups` gives the optimizer group of each trainable parameter, `tp` cuts the parameters.

    One tensor that must stay whole makes the unit's cuts fall between tensors.
    """
    specs = []
    for name in spec.params:
        number, whole = groups.get(name, Group(0)) if policy.trainable else Group(0)
        part = part_of(params[name], tp.size, tp.rank)
        specs.append(TensorSpec(name, tuple(local(params[name]).shape), number, whole, part))
    cut = Cut.TENSOR if any(tensor.whole for tensor in specs) else Cut.ELEMENT
    return Layout.build(specs, world_size, policy.weight_dtype.itemsize, cut)
