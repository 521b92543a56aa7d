"""Accelerate's YAML, rewritten into the DeepSpeed configuration that it describes.

Accelerate builds a DeepSpeed configuration from the keys of `deepspeed_config`, or reads a file that they name.
Messages name the keys of the YAML, not those of the translation.
"""

import os
from pathlib import Path
from typing import Any

from shardwise.config.dialects import deepspeed
from shardwise.config.dialects.rules import BY_CODE, FileSection, KeyRule, Refused, Rules, switched_on
from shardwise.config.draft import ConfigDraft
from shardwise.config.files import read_file, read_text, text_of
from shardwise.config.sections import Batch
from shardwise.config.values import any_value, choice, flag, nearest, positive, text
from shardwise.errors import ConfigError

_LAUNCHER = KeyRule(any_value, "read by the launcher, not by the engine")
_COMPILATION = Refused("compilation by Accelerate (call torch.compile on the model instead)")
_TOP: Rules = {
    **dict.fromkeys(("deepspeed_config", "distributed_type", "mixed_precision", "num_processes"), BY_CODE),
    **dict.fromkeys(("parallelism_config", "use_cpu"), BY_CODE),
    **dict.fromkeys(("compute_environment", "main_training_function", "command_file", "commands", "debug"), _LAUNCHER),
    **dict.fromkeys(("machine_rank", "main_process_ip", "main_process_port", "num_machines"), _LAUNCHER),
    **dict.fromkeys(("rdzv_backend", "same_network", "enable_cpu_affinity", "gpu_ids", "mpirun_config"), _LAUNCHER),
    **dict.fromkeys(("sagemaker_config", "ipex_config", "downcast_bf16", "tpu_cluster", "tpu_env"), _LAUNCHER),
    **dict.fromkeys(("tpu_name", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_zone"), _LAUNCHER),
    **dict.fromkeys(("dynamo_backend", "dynamo_config"), _COMPILATION),
    "fp8_config": Refused("fp8"),
    "fsdp_config": Refused("FSDP"),
    "megatron_lm_config": Refused("Megatron-LM"),
}
KEYS = frozenset(_TOP)
LEGACY_KEYS = {"fp16"}  # a flag in old Accelerate files; a section of this name is DeepSpeed's

_PARALLELISM: Rules = {
    "parallelism_config_tp_size": Refused("tensor parallelism"),
    "parallelism_config_sp_size": Refused("sequence parallelism"),
    "parallelism_config_cp_size": Refused("context parallelism"),
    "parallelism_config_dp_replicate_size": Refused("replicas of sharded groups (HSDP)"),
}

# Keys of deepspeed_config: those with a DeepSpeed key of another name, and those that set nothing.
_TRANSLATED = {
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
} | {key: key for key in deepspeed.KEYS}
_DEEPSPEED_CONFIG: Rules = {
    **dict.fromkeys((*_TRANSLATED, "deepspeed_config_file"), BY_CODE),
    **dict.fromkeys(("deepspeed_hostfile", "deepspeed_multinode_launcher"), _LAUNCHER),
    **dict.fromkeys(("deepspeed_inclusion_filter", "deepspeed_exclusion_filter"), _LAUNCHER),
    "deepspeed_moe_layer_cls_names": KeyRule(any_value, "no effect: whole blocks are units, so experts do not matter"),
    "zero3_init_flag": KeyRule(any_value, "no effect: see shardwise.deferred_init() for models larger than memory"),
}


def translate(data: dict[str, Any], draft: ConfigDraft, folder: Path) -> None:
    """Write an Accelerate configuration into the draft. `folder` is the folder of its file."""
    top = FileSection(draft, "", data)
    for key in data:
        if key not in KEYS | LEGACY_KEYS:
            raise top.error(key, f"unknown key of Accelerate{nearest(key, KEYS)}")
    kind = data.get("distributed_type")
    if str(kind).upper() != "DEEPSPEED" and not (kind is None and "deepspeed_config" in data):
        raise top.error("distributed_type", "expected DEEPSPEED, the only type that is ZeRO")
    top.refuse(_TOP)
    parallelism = top.inner("parallelism_config")
    parallelism.refuse(_PARALLELISM)
    if parallelism.data:
        top.note("parallelism_config", "no effect: only the data-parallel axis is larger than 1")
    top.apply(_TOP | dict.fromkeys(LEGACY_KEYS, BY_CODE))
    section = top.inner("deepspeed_config")
    config, prefix = _from_file(section, folder)
    _merge_keys(section, config)
    _mixed_precision(top, config)
    draft.prefix = prefix
    deepspeed.translate(config, draft)
    draft.prefix = ""  # the remaining keys are those of the YAML itself
    _processes(top)


def _from_file(section: FileSection, folder: Path) -> tuple[dict[str, Any], str]:
    """The DeepSpeed configuration that the YAML names, if any, and what to put before its keys in messages.

    The name is a path or, as in Accelerate, JSON or base64 of JSON.
    """
    if "deepspeed_config_file" not in section.data:
        return {}, "deepspeed_config."
    named = section.read("deepspeed_config_file", text)
    if (given := text_of(named)) is not None:
        return read_text(given, f"{section.draft.source}: deepspeed_config_file"), "deepspeed_config."
    for path in (folder / named, Path(named)):
        if os.path.isfile(path):
            section.note("deepspeed_config_file", "read in its place")
            return read_file(path), f"{named}: "
    message = "no such file in the YAML's folder or the working directory; it holds the configuration"
    raise section.error("deepspeed_config_file", message)


def _merge_keys(section: FileSection, config: dict[str, Any]) -> None:
    """Merge the other keys of deepspeed_config into the file's."""
    for key, value in section.data.items():
        if key in _TRANSLATED:
            _merge(config, _TRANSLATED[key], value, f"deepspeed_config.{key}", section.draft)
        elif key not in _DEEPSPEED_CONFIG:
            raise section.error(key, f"unknown key of deepspeed_config{nearest(key, _DEEPSPEED_CONFIG)}")
    section.apply(_DEEPSPEED_CONFIG)


def _merge(config: dict[str, Any], target: str, value: Any, path: str, draft: ConfigDraft) -> None:
    """Set `target` (such as "zero_optimization.stage"); a value that is already there must be equal."""
    if isinstance(value, dict) and isinstance(config.get(target), dict):
        for key, inner in value.items():
            _merge(config, f"{target}.{key}", inner, f"{path}.{key}", draft)
        return
    *parents, leaf = target.split(".")
    node = config
    for parent in parents:
        node[parent] = dict(draft.section(target, node.get(parent)))
        node = node[parent]
    present = node.get(leaf)
    if present not in (None, "auto", value):
        raise draft.error(path, value, f"contradicts {target} = {present!r}; keep one of the two")
    node[leaf] = value
    draft.aliases[target] = path


def _mixed_precision(top: FileSection, config: dict[str, Any]) -> None:
    """Apply mixed_precision where the DeepSpeed configuration leaves it open; a contradiction is an error."""
    legacy = "fp16" if switched_on(top.data.get("fp16")) else None
    value = top.data.get("mixed_precision", legacy)
    if value is None:
        return
    draft, key = top.draft, "mixed_precision" if "mixed_precision" in top.data else "fp16"
    # YAML 1.1 reads a bare `no` as false.
    chosen = draft.read(key, choice("no", "fp16", "bf16", "fp8"), "no" if value is False else value)
    if chosen == "fp8":
        raise top.error(key, "asks for fp8, which shardwise does not do; use bf16 or fp16")
    if chosen == "no":
        top.note("mixed_precision", "fp32, unless deepspeed_config sets a precision")
        for name in ("fp16", "bf16"):
            section = draft.section(name, config.get(name))
            if section.get("enabled") == "auto":
                config[name] = section | {"enabled": False}
        return
    for name in ("fp16", "bf16"):
        section = draft.section(name, config.get(name))
        present = section.get("enabled")
        wanted = name == chosen
        if present not in (None, "auto") and draft.read(key, flag, present) != wanted and (wanted or present):
            message = f"contradicts {name}.enabled = {str(present).lower()} of the DeepSpeed configuration"
            raise top.error(key, message)
        if wanted:
            config[name] = section | {"enabled": True}
            draft.aliases[f"{name}.enabled"] = "mixed_precision"


def _processes(top: FileSection) -> None:
    """Read use_cpu and num_processes, and check the batch triple for that number of ranks."""
    if top.data.get("use_cpu") is not None:
        top.set("use_cpu", "runtime.use_cpu", top.read("use_cpu", flag))
    if top.data.get("num_processes") in (None, -1):
        return
    world_size = top.read("num_processes", positive)
    top.note("num_processes", f"W = {world_size}, for the launcher: shardwise run -n {world_size}")
    try:
        Batch(**top.draft.nested().get("batch", {})).resolve(world_size)
    except ConfigError as error:
        raise top.error("num_processes", str(error)) from None
    except ValueError:
        return  # validation of the sections reports it with the key
