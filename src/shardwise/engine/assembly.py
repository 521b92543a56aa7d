"""Plans and builds the units of a model: how it is divided, what rests where, how much may be in flight."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.comm import Comm
from shardwise.config import Config
from shardwise.engine.residency import Budget, moments_each
from shardwise.errors import ConfigError, ConfigWarning
from shardwise.memory.ledger import PAGE_BYTES
from shardwise.memory.reduce_plan import choose_reduce_plan
from shardwise.offload.context import OffloadContext
from shardwise.optim.optimizers import GroupRule, groups_of
from shardwise.optim.probe import Scope, is_by_tensor, scope_of
from shardwise.partition import Layout
from shardwise.partition.dtensors import local
from shardwise.partition.policy import Group, policy_for
from shardwise.partition.stored import loose_tensors, prepare_quantized, stored_tensors
from shardwise.partition.units import UnitSpec, divide
from shardwise.tensors import contiguous
from shardwise.unit import Unit
from shardwise.unit.plan import UnitPlan, layout_for

_LOG = logging.getLogger("shardwise")


def plan_units(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config, comm: Comm, budget: Budget
) -> list[UnitPlan]:
    """What is decided about the units of a model. A collective if the budget asks how much memory the hosts have."""
    plans = budget.place(_plans(model, optimizer, config, comm), moments_each(optimizer))
    return _with_reduce_plan(plans, config, comm)


def build_units(
    plans: Sequence[UnitPlan],
    model: nn.Module,
    comm: Comm,
    offload: OffloadContext,
    on_read: Callable[[Unit], bool],
) -> list[Unit]:
    """The units of a model, with rank 0's values. A collective."""
    prepare_quantized(model)
    comm.name_units([plan.name for plan in plans])
    for tensor in (*model.buffers(), *loose_tensors(model)):
        with contiguous(tensor) as values:
            comm.model_group.broadcast(values)
            comm.broadcast(values)
    params = stored_tensors(model)
    units, left_bytes = [], 0
    for plan in plans:
        left_bytes += sum(local(params[name]).nbytes for name in plan.spec.params)
        units.append(Unit(plan, params, comm, offload, on_read))
        # The memory of the model's own parameters is given back unit by unit: torch's allocator would cut it up for the
        # next unit's buffers, which are smaller, and lose the rest of each block (1 GiB of a 0.5 B MLP under zero0).
        # test_gpu bounds it.
        if comm.device.type == "cuda" and left_bytes >= PAGE_BYTES:
            torch.cuda.empty_cache()
            left_bytes = 0
    return units


def _plans(model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config, comm: Comm) -> list[UnitPlan]:
    params = stored_tensors(model)
    groups = groups_of(optimizer, params, _rule(config, comm)) if optimizer is not None else {}
    largest = max((local(params[name]).nbytes for name, group in groups.items() if group.whole), default=0)
    _check_whole(groups, params)
    plans = []
    for spec in divide(model, **_division(model, config, comm.world_size, largest)):
        policy = policy_for(config, spec.trainable and optimizer is not None, spec.dtype, spec.inner)
        layout = layout_for(spec, params, groups, policy, comm.world_size, comm.model_group)
        _warn_of_padding(spec, layout, comm.world_size)
        plans.append(UnitPlan(spec, layout, policy, comm.shape))
    return plans


def _check_whole(groups: Mapping[str, Group], params: Mapping[str, torch.Tensor]) -> None:
    for name, group in groups.items():
        if group.whole and local(params[name]).shape != params[name].shape:
            raise ConfigError(
                f"the optimizer needs {name!r} whole, and tensor parallelism has cut it: use one that updates each "
                "element by itself, such as AdamW, or leave this tensor out of the tensor-parallel plan"
            )


def _rule(config: Config, comm: Comm) -> GroupRule:
    """What the configuration says about whole tensors, or else what the optimizer's class needs."""
    if "whole_tensors" in config.runtime.model_fields_set:
        return lambda optimizer, group: config.runtime.whole_tensors or is_by_tensor(optimizer)

    def needs_whole(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
        kind, scope = type(optimizer).__name__, scope_of(optimizer, group, comm.device)
        if scope is Scope.GROUP:
            raise ConfigError(
                f"optimizer {kind}: its update of a tensor depends on other tensors, or on how often step() is called "
                "(tried on small ones), and ranks update different tensors in several calls: use an optimizer that "
                "updates each tensor by itself, such as AdamW, Muon or LAMB; if it does, set runtime.whole_tensors"
            )
        if scope is Scope.UNKNOWN and comm.everyone.rank == 0:
            warnings.warn(
                f"optimizer {kind} could not be tried on small tensors, so it gets every tensor whole, on one rank, in "
                "several calls of step() for each update: if it counts its calls (Lookahead), use another; if it "
                "updates each element by itself, set runtime.whole_tensors: false, which saves memory",
                ConfigWarning,
                stacklevel=2,
            )
        return scope is not Scope.ELEMENT

    return needs_whole


def _with_reduce_plan(plans: Sequence[UnitPlan], config: Config, comm: Comm) -> list[UnitPlan]:
    """The same reduce plan for all units, chosen by the sizes of the trainable ones."""
    reduce_plan = choose_reduce_plan(
        [plan.grad_sizes(comm) for plan in plans if plan.policy.trainable],
        is_sharded=config.placement.grads.sharding != "replicated",
        accumulates=config.batch.accumulation > 1,
        bound_bytes=config.gradients.reduce_bucket_bytes,
    )
    return [dataclasses.replace(plan, reduce_plan=reduce_plan) for plan in plans]


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
