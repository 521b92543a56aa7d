"""From a model and its configuration to units: how it is divided, what rests where, how much may be in flight."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from shardwise.comm.comm import Comm
from shardwise.config import Config
from shardwise.engine.residency import Budget, moments_each, open_disk
from shardwise.memory.ledger import PAGE_BYTES
from shardwise.memory.reduce_plan import choose_reduce_plan
from shardwise.offload.context import OffloadContext
from shardwise.optim.optimizers import groups_of
from shardwise.partition.layout import Layout
from shardwise.partition.policy import Policy, policy_for
from shardwise.partition.units import UnitSpec, divide
from shardwise.unit.unit import Unit, layout_for

_LOG = logging.getLogger("shardwise")


def assemble(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: Config,
    comm: Comm,
    offload: OffloadContext,
    budget: Budget,
) -> list[Unit]:
    """The units of a model, with its values. A collective."""
    params = dict(model.named_parameters())
    groups = groups_of(optimizer, params, config.runtime.whole_tensors) if optimizer is not None else {}
    for buffer in model.buffers():
        comm.broadcast(buffer)
    plans: list[tuple[UnitSpec, Policy, Layout]] = []
    largest = max((params[name].nbytes for name, group in groups.items() if group.whole), default=0)
    for spec in divide(model, **_division(model, config, comm.world_size, largest)):
        policy = policy_for(config, spec.trainable and optimizer is not None, spec.dtype)
        layout = layout_for(spec, params, groups, policy, comm.world_size)
        _warn_of_padding(spec, layout, comm.world_size)
        plans.append((spec, policy, layout))
    layouts, moments = [layout for _, _, layout in plans], moments_each(optimizer)
    policies = budget.place([policy for _, policy, _ in plans], layouts, moments)
    open_disk(offload, comm, config.offload, policies, layouts, moments)
    units = _built(
        [(spec, layout, policy) for (spec, _, layout), policy in zip(plans, policies, strict=True)],
        params,
        comm,
        offload,
    )
    _choose_reduce_plan(units, config)
    return units


def _built(
    parts: list[tuple[UnitSpec, Layout, Policy]], params: dict[str, nn.Parameter], comm: Comm, offload: OffloadContext
) -> list[Unit]:
    """The units, one after the other. What the parameters of each lay in goes back to the device at once: torch's
    allocator would cut it up for the next unit's buffers, which are smaller, and the rest of each piece were lost
    (1 GiB of a 0.5 B MLP under zero0). test_gpu bounds it."""
    units, left_bytes = [], 0
    for spec, layout, policy in parts:
        left_bytes += sum(params[name].nbytes for name in spec.params)
        units.append(Unit(spec, params, layout, policy, comm, offload))
        if comm.device.type == "cuda" and left_bytes >= PAGE_BYTES:
            torch.cuda.empty_cache()
            left_bytes = 0
    return units


def _division(model: nn.Module, config: Config, world_size: int, largest_bytes: int) -> dict[str, Any]:
    """The choice of units for `divide`: names in the configuration are module paths or else class names.

    Whole tensors, the largest of `largest_bytes`, are spread evenly only in units that have several for each rank.
    """
    runtime = config.runtime
    if runtime.units == "auto":
        return {
            "min_bytes": runtime.min_unit_bytes,
            "max_bytes": runtime.gather_bucket_bytes,
            "floor_bytes": largest_bytes * world_size * 3 // 4 if world_size > 1 else 0,
        }
    paths = {name for name, _ in model.named_modules()}
    return {
        "modules": [name for name in runtime.units if name in paths] or None,
        "classes": [name for name in runtime.units if name not in paths] or None,
        "min_bytes": runtime.min_unit_bytes,
    }


def _warn_of_padding(spec: UnitSpec, layout: Layout, world_size: int) -> None:
    if layout.padding_numel > layout.used_numel and any(slot.spec.whole for slot in layout.slots):
        _LOG.warning(
            "unit %s has too few whole tensors for %d ranks: its %d elements take %d; larger units "
            "(runtime.min_unit_bytes) are packed better",
            *(spec.name, world_size, layout.used_numel, layout.numel),
        )


def _choose_reduce_plan(units: list[Unit], config: Config) -> None:
    trainable = [unit.grads for unit in units if unit.grads is not None]
    reduce_plan = choose_reduce_plan(
        [grads.sizes for grads in trainable],
        is_sharded=config.placement.grads.sharding == "sharded",
        accumulates=config.batch.accumulation > 1,
        bound_bytes=config.gradients.reduce_bucket_bytes,
    )
    for grads in trainable:
        grads.reduce_plan = reduce_plan
