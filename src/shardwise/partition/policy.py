"""What the configuration means for a unit: which kinds are sharded, and every dtype. Data, read by one code path."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shardwise.config import Config
from shardwise.config.sections import Tier

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Policy:
    """Placement and precision of a unit.

    weight_dtype      the copy that computes; the parameters the model sees
    master_dtype      the copy that is updated and rests; where it equals weight_dtype, one storage serves both
    grad_dtype        the full flat gradients that autograd adds into
    accumulate_dtype  reduced gradients as they are held
    reduce_dtype      gradients on the wire
    *_tier            where the kind rests
    """

    trainable: bool
    weights_sharded: bool
    grads_sharded: bool
    optim_sharded: bool
    weight_dtype: torch.dtype
    master_dtype: torch.dtype
    grad_dtype: torch.dtype
    accumulate_dtype: torch.dtype
    reduce_dtype: torch.dtype
    weights_tier: Tier = "device"
    grads_tier: Tier = "device"
    optim_tier: Tier = "device"

    @property
    def master_tier(self) -> Tier:
        """A master that is the weights rests where they do, and on the device while they are replicated; a copy of its
        own rests with the optimizer's states."""
        if self.weight_dtype == self.master_dtype:
            return self.weights_tier if self.weights_sharded else "device"
        return self.optim_tier

    @property
    def uses_disk(self) -> bool:
        return "disk" in (self.master_tier, self.optim_tier)

    def cached(self) -> Policy:
        """The same with the host in the place of the disk."""
        weights: Tier = "host" if self.weights_tier == "disk" else self.weights_tier
        optim: Tier = "host" if self.optim_tier == "disk" else self.optim_tier
        return dataclasses.replace(self, weights_tier=weights, optim_tier=optim)

    def on_device(self) -> Policy:
        """The same with every kind on the device."""
        return dataclasses.replace(self, weights_tier="device", grads_tier="device", optim_tier="device")


class Group(NamedTuple):
    """The parameter group of a parameter: its number, and whether its optimizer needs tensors undivided."""

    number: int
    whole: bool = False


def policy_for(config: Config, trainable: bool, dtype: torch.dtype) -> Policy:
    """The policy of a unit whose parameters have `dtype` in the user's model."""
    placement, precision = config.placement, config.precision
    weight_dtype = _weight_dtype(config, dtype)
    several = config.batch.accumulation > 1
    accumulate_dtype = DTYPES[precision.accumulate_dtype or ("fp32" if several else _name(weight_dtype))]
    grads_sharded = placement.grads.sharding == "sharded"
    grad_dtype = weight_dtype if grads_sharded else accumulate_dtype
    weights_sharded = placement.weights.sharding == "sharded"
    return Policy(
        trainable=trainable,
        weights_sharded=weights_sharded,
        grads_sharded=grads_sharded,
        # A frozen unit has no optimizer state: what rests of it is its weights.
        optim_sharded=placement.optim.sharding == "sharded" if trainable else weights_sharded,
        weight_dtype=weight_dtype,
        master_dtype=torch.float32 if trainable else weight_dtype,
        grad_dtype=grad_dtype,
        accumulate_dtype=accumulate_dtype,
        reduce_dtype=DTYPES[precision.reduce_dtype] if precision.reduce_dtype else grad_dtype,
        weights_tier=placement.weights.tier,
        grads_tier=placement.grads.tier,
        # A frozen unit's master is its weights.
        optim_tier=placement.optim.tier if trainable else placement.weights.tier,
    )


def _weight_dtype(config: Config, dtype: torch.dtype) -> torch.dtype:
    return DTYPES[config.precision.weights_dtype] if dtype.is_floating_point else dtype


def _name(dtype: torch.dtype) -> str:
    return next(name for name, value in DTYPES.items() if value == dtype)
