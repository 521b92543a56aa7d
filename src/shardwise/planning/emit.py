"""A configuration file of the chosen preset that both shardwise and DeepSpeed read."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.config import Config
from shardwise.config.presets import NVME_FOLDER, PRESETS, STAGES
from shardwise.errors import ConfigError

if TYPE_CHECKING:
    from shardwise.planning.planner import Plan

_TIERS = {"host": "cpu", "disk": "nvme"}


def emit(plan: Plan, path: Path) -> list[str]:
    """Write the recommended configuration; what the plan counts on and the file cannot bring about."""
    if plan.advice.preset is None:
        raise ConfigError(f"--emit {path}: {plan.advice.reason}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--emit {path}: there is no folder {path.absolute().parent}")
    settings = deepspeed_settings(plan, plan.advice.preset)
    Config.load(settings)
    with writing("--emit", path):
        path.write_text(json.dumps(settings, indent=2) + "\n")
    return list(_left_to_do(plan))


@contextlib.contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """A ConfigError that names the option if the file cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror or error}") from None


def _left_to_do(plan: Plan) -> Iterator[str]:
    if plan.workload.checkpointing:
        yield "activations are recomputed: shardwise does it by this file; for DeepSpeed, switch it on in the model"
    if plan.workload.lora is not None:
        rank, targets = plan.workload.lora
        yield f"the plan counts on LoRA of rank {rank} on {', '.join(targets)}: put the adapters on the model"


def deepspeed_settings(plan: Plan, preset: str) -> dict[str, Any]:
    """The settings of `preset` in DeepSpeed's words."""
    workload, placement = plan.workload, PRESETS[preset]
    shardings = [(row.weights.sharding, row.grads.sharding, row.optim.sharding) for row in STAGES]
    own = (placement.weights.sharding, placement.grads.sharding, placement.optim.sharding)
    zero: dict[str, Any] = {"stage": shardings.index(own)}
    for key, kind in (("offload_optimizer", placement.optim), ("offload_param", placement.weights)):
        if kind.tier != "device":
            zero[key] = {"device": _TIERS[kind.tier], "pin_memory": True}
            if kind.tier == "disk":
                zero[key]["nvme_path"] = NVME_FOLDER
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": workload.micro_batch,
        "gradient_accumulation_steps": workload.accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "shardwise": {"checkpointing": workload.checkpointing},
        "optimizer": {"type": workload.optimizer, "params": {"lr": 1e-4}},
    }
    if workload.precision != "fp32":
        settings[workload.precision] = {"enabled": True}
    return settings
