"""A configuration file of the chosen preset that both shardwise and DeepSpeed read."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.config import Config
from shardwise.config.presets import NVME_FOLDER, PRESETS, STAGES
from shardwise.errors import ConfigError

if TYPE_CHECKING:
    from shardwise.planning.planner import Plan
    from shardwise.planning.search import Candidate
    from shardwise.planning.workload import Workload

_TIERS = {"host": "cpu", "disk": "nvme"}


def emit(plan: Plan, path: Path, found: Sequence[Candidate] | None = None) -> list[str]:
    """Write the recommended configuration, or the best that a search `found`; what the plan counts on and the file
    cannot bring about."""
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--emit {path}: there is no folder {path.absolute().parent}")
    if found:
        workload = found[0].workload(plan.workload)
        settings = deepspeed_settings(workload, found[0].preset, found[0].device_memory)
    elif plan.advice.preset is None or found is not None:
        raise ConfigError(f"--emit {path}: {plan.advice.reason}")
    else:
        workload = plan.workload
        settings = deepspeed_settings(workload, plan.advice.preset)
    Config.load(settings)
    with writing("--emit", path):
        path.write_text(json.dumps(settings, indent=2) + "\n")
    return list(_left_to_do(workload))


@contextlib.contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """A ConfigError that names the option if the file cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror or error}") from None


def _left_to_do(workload: Workload) -> Iterator[str]:
    if workload.checkpointing:
        yield "activations are recomputed: shardwise does it by this file; for DeepSpeed, switch it on in the model"
    if workload.lora is not None:
        rank, targets = workload.lora
        yield f"the plan counts on LoRA of rank {rank} on {', '.join(targets)}: put the adapters on the model"


def deepspeed_settings(workload: Workload, preset: str, device_memory: int | None = None) -> dict[str, Any]:
    """The settings of `preset` in DeepSpeed's words."""
    placement = PRESETS[preset]
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
    if device_memory is not None:
        settings["shardwise"]["device_memory"] = device_memory
    if workload.precision != "fp32":
        settings[workload.precision] = {"enabled": True}
    return settings
