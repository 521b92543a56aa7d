"""What is decided about a unit before it is built: its layout, its policy, and how its gradients are reduced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from shardwise.comm import Comm
from shardwise.comm.model_group import ModelGroup
from shardwise.config.shape import NodeShape, Sharding
from shardwise.memory.reduce_plan import GradSizes, ReducePlan, UpdateSizes, sum_block_numel
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

    @property
    def full_bytes(self) -> int:
        """What gathered weights take."""
        return self.layout.numel * self.policy.weight_dtype.itemsize

    @property
    def moved_bytes(self) -> int:
        """What of that rests on a rank while they are released, in the same dtype: see `SharedMaster`."""
        policy = self.policy
        is_shared = policy.weight_dtype == policy.master_dtype and policy.master_tier == "device"
        if not policy.weights_sharded or policy.weights_rest_apart or not is_shared:
            return 0
        return self.owned_numel * policy.weight_dtype.itemsize

    def grad_sizes(self, comm: Comm) -> GradSizes:
        """What the unit's gradients take, for the choice of the reduce plan."""
        layout, policy = self.layout, self.policy
        item = policy.grad_dtype.itemsize
        row = layout.shard_numel * policy.reduce_dtype.itemsize
        held_numel = self.part_numel("node" if policy.grads_cut == "node" else "sharded")
        is_exact = policy.reduce_dtype == torch.float32  # summed in place, without a block of its own
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

    @property
    def is_alone(self) -> bool:
        """Whether nothing is sent: gradients go straight to where they are held."""
        return self.shape.world_size == 1 and self.policy.reduce_dtype == self.policy.grad_dtype

    @property
    def adds_in_place(self) -> bool:
        """Whether autograd adds the gradients of later micro-batches to those that are held."""
        policy = self.policy
        is_like_replicated = self.is_alone and policy.grad_dtype == policy.accumulate_dtype
        return policy.grads_cut == "replicated" or (is_like_replicated and policy.grads_tier == "device")

    @property
    def makes_whole(self) -> bool:
        """Whether what is gathered for a replicated optimizer needs a buffer besides the gradients that are held."""
        cut = self.policy.optim_cut
        return cut not in ("sharded", self.policy.grads_cut) and self.shape.world_size > 1

    @property
    def held_dtype(self) -> torch.dtype:
        """The dtype of gradients between backward and update."""
        policy = self.policy
        return policy.grad_dtype if policy.grads_cut == "replicated" else policy.accumulate_dtype

    @cached_property
    def cast_bytes(self) -> int:
        """The bytes of an fp32 copy of the gradients that this rank updates with; 0 where they are in fp32."""
        return 0 if self.held_dtype == torch.float32 else self.owned_numel * torch.float32.itemsize

    @cached_property
    def update_sizes(self) -> UpdateSizes:
        """What the unit's update makes of its gradients, where they are on the device."""
        whole = self.owned_numel * self.held_dtype.itemsize if self.makes_whole else 0
        held = self.part_numel(self.policy.grads_cut) * self.held_dtype.itemsize
        return UpdateSizes(
            self.owned_numel, whole + self.cast_bytes, self.cast_bytes - held if self.cast_bytes else whole
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
