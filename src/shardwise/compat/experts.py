"""`deepspeed.moe.utils`: for models without DeepSpeed's own MoE layers, whose experts shardwise does not distribute."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from shardwise.errors import CompatibilityError


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether DeepSpeed's MoE layer has marked a parameter as an expert's."""
    return not getattr(param, "allreduce", True)


def has_moe_layers(model: nn.Module) -> tuple[bool, int]:
    """Whether a model has such parameters, and how many experts: always 0."""
    return any(is_moe_param(param) for param in model.parameters()), 0


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: float | None = None
) -> list[dict[str, Any]]:
    """The same groups: there are no experts to separate."""
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    if any(is_moe_param(param) for group in groups for param in group["params"]):
        raise CompatibilityError(
            "DeepSpeed's MoE layer asks for expert parallelism: use the model library's own experts, which are sharded "
            "like all other parameters"
        )
    return groups
