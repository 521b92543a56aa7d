"""What the configuration means for one unit: the placement of each kind, and every dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from shardwise.config import Config
from shardwise.config.costs import RestingKind, resting_frozen, resting_kinds, wire_times
from shardwise.config.sections import KindPlacement, Placement, Tier
from shardwise.config.shape import AXES, Axis, Sharding

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Policy:
    """Placement and precision of a unit."""

    trainable: bool
    placement: Placement  # a frozen unit's optim is placed like its weights, which are its master
    weight_dtype: torch.dtype  # the copy that computes: the parameters that the model sees
    master_dtype: torch.dtype  # the copy that rests and is updated; if it equals weight_dtype, one storage serves both
    grad_dtype: torch.dtype  # the full flat gradients that autograd adds into
    accumulate_dtype: torch.dtype  # reduced gradients until the update
    reduce_dtype: torch.dtype  # gradients of a micro-batch on the wire
    sum_dtype: torch.dtype  # held gradients on the wire: sums of all micro-batches, where they are reduced afterwards

    # Cached, because every gather and reduction of the unit reads some of these.
    @cached_property
    def weights_sharded(self) -> bool:
        """Whether weights are gathered for their use, and released after it."""
        return self.placement.weights.sharding != "replicated"

    @cached_property
    def weights_rest_apart(self) -> bool:
        """Whether a rank keeps weights that it does not update: its node's part of them. Otherwise sharded weights are
        gathered from the masters."""
        return self.weights_sharded and self.placement.weights.sharding != self.placement.optim.sharding

    @cached_property
    def grads_cut(self) -> Sharding:
        return self.placement.grads.sharding

    @cached_property
    def optim_cut(self) -> Sharding:
        return self.placement.optim.sharding

    @cached_property
    def weights_cut(self) -> Sharding:
        return self.placement.weights.sharding

    @property
    def weights_tier(self) -> Tier:
        return self.placement.weights.tier

    @property
    def grads_tier(self) -> Tier:
        return self.placement.grads.tier

    @property
    def optim_tier(self) -> Tier:
        return self.placement.optim.tier

    @cached_property
    def master_tier(self) -> Tier:
        """The weights' tier where weights and master are one storage, else that of the optimizer's states."""
        return self.weights_tier if self.weight_dtype == self.master_dtype else self.optim_tier

    @property
    def uses_disk(self) -> bool:
        return "disk" in (self.master_tier, self.optim_tier)

    def cached(self) -> Policy:
        """The same policy with the host in place of the disk."""
        return self._moved({"disk": "host"})

    def on_device(self) -> Policy:
        """The same policy with every kind on the device."""
        return self._moved({"host": "device", "disk": "device"})

    def _moved(self, tiers: Mapping[Tier, Tier]) -> Policy:
        kinds = {
            kind: KindPlacement(sharding=own.sharding, tier=tiers.get(own.tier, own.tier))
            for kind, own in self.placement
        }
        return dataclasses.replace(self, placement=Placement(**kinds))

    def resting(self, moments: int) -> list[RestingKind]:
        """What rests of the unit, kind by kind; the optimizer has `moments` bytes per element."""
        weights = self.weight_dtype.itemsize
        if not self.trainable:
            return resting_frozen(self.placement, weights)
        return resting_kinds(self.placement, weights, self.accumulate_dtype.itemsize, moments)

    def wire_bytes_each(self, accumulation: int, axis: Axis = "inner") -> int:
        """Bytes per element of the unit that the collectives of one step carry over an axis: contract C3."""
        times = wire_times(self.placement, accumulation, axis)
        gathers = times.gathers * self.weight_dtype.itemsize
        if not self.trainable:
            return gathers
        updated = self.weight_dtype if axis in AXES[self.optim_cut] else self.accumulate_dtype
        return gathers + times.reductions * self.wire_dtype(axis).itemsize + times.updates * updated.itemsize

    def wire_dtype(self, axis: Axis) -> torch.dtype:
        """The dtype of gradients that are sent over an axis: those of a micro-batch, or the sums of all."""
        return self.reduce_dtype if axis in AXES[self.grads_cut] else self.sum_dtype


class Group(NamedTuple):
    """The parameter group of a parameter: its number, and whether its optimizer needs tensors undivided."""

    number: int
    whole: bool = False


def is_storage(dtype: torch.dtype, trainable: bool, inner: bool) -> bool:
    """Whether values keep their dtype in any precision: what is `inner` to quantised parameters, integers, and frozen
    floats of 8 bits."""
    return inner or not dtype.is_floating_point or (dtype.itemsize == 1 and not trainable)


def policy_for(config: Config, trainable: bool, dtype: torch.dtype, inner: bool = False) -> Policy:
    """The policy of a unit whose parameters have `dtype` in the user's model, or are `inner` to quantised ones."""
    placement, precision = config.placement, config.precision
    if not trainable:
        placement = Placement(weights=placement.weights, grads=placement.grads, optim=placement.weights)
    keeps_dtype = is_storage(dtype, trainable, inner) or precision.compute == "model"
    weight_dtype = dtype if keeps_dtype else DTYPES[precision.weights_dtype]
    accumulate_dtype = DTYPES[config.accumulate_dtype]
    if precision.compute == "model" and config.batch.accumulation == 1 and precision.accumulate_dtype is None:
        accumulate_dtype = weight_dtype
    grad_dtype = weight_dtype if placement.grads.sharding != "replicated" else accumulate_dtype
    given = DTYPES[precision.reduce_dtype] if precision.reduce_dtype else None
    return Policy(
        trainable=trainable,
        placement=placement,
        weight_dtype=weight_dtype,
        master_dtype=torch.float32 if trainable else weight_dtype,
        grad_dtype=grad_dtype,
        accumulate_dtype=accumulate_dtype,
        reduce_dtype=given or grad_dtype,
        sum_dtype=given or accumulate_dtype,
    )
