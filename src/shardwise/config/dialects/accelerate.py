"""Accelerate's YAML, rewritten into the DeepSpeed configuration that it describes.

Accelerate builds a DeepSpeed configuration from the keys of `deepspeed_config`, or reads a file that they name.
Messages name the keys of the YAML, not those of the translation.
"""

import base64
import os
from pathlib import Path
from typing import Any

from shardwise.config.dialects import deepspeed
from shardwise.config.dialects.deepspeed_keys import switched_on
from shardwise.config.draft import ConfigDraft, KeyNote, ValueOrigin
from shardwise.config.files import read_file, read_text
from shardwise.config.sections import Batch
from shardwise.config.values import KeyLocation, choice, flag, nearest, shown, text
from shardwise.errors import ConfigError
from shardwise.sizes import whole

_LAUNCH = "read by the launcher, not by the engine"
_LAUNCHER = {
    "compute_environment",
    "command_file",
    "commands",
    "debug",
    "enable_cpu_affinity",
    "gpu_ids",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "main_training_function",
    "mpirun_config",
    "num_machines",
    "rdzv_backend",
    "same_network",
    "sagemaker_config",
    "tpu_env",
    "tpu_name",
    "tpu_use_cluster",
    "tpu_use_sudo",
    "tpu_vm",
    "tpu_zone",
    "downcast_bf16",
    "tpu_cluster",
    "ipex_config",
}
_FEATURES = {
    "fsdp_config": "FSDP",
    "megatron_lm_config": "Megatron-LM",
    "fp8_config": "fp8",
    "dynamo_config": "compilation by Accelerate (call torch.compile on the model instead)",
    "dynamo_backend": "compilation by Accelerate (call torch.compile on the model instead)",
}
_READ = {"deepspeed_config", "distributed_type", "mixed_precision", "num_processes", "parallelism_config", "use_cpu"}
KEYS = _LAUNCHER | set(_FEATURES) | _READ
LEGACY_KEYS = {"fp16"}  # a flag in old Accelerate files; a section of this name is DeepSpeed's

# Keys of deepspeed_config, with their DeepSpeed keys.
_TRANSLATED = {
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
_DEEPSPEED_LAUNCHER = {
    "deepspeed_hostfile": _LAUNCH,
    "deepspeed_inclusion_filter": _LAUNCH,
    "deepspeed_exclusion_filter": _LAUNCH,
    "deepspeed_multinode_launcher": _LAUNCH,
    "deepspeed_moe_layer_cls_names": "no effect: whole blocks are units, so experts inside do not matter",
    "zero3_init_flag": "no effect: see shardwise.deferred_init() for models larger than memory",
}


def translate(data: dict[str, Any], draft: ConfigDraft, folder: Path) -> None:
    """Write an Accelerate configuration into the draft. `folder` is the folder of its file."""
    where = draft.where()
    for key in data:
        if key not in KEYS | LEGACY_KEYS:
            raise where.at(key).error(data[key], f"unknown key of Accelerate{nearest(key, KEYS)}")
    _check_type(data, where)
    _refuse(data, draft)
    for key in sorted(_LAUNCHER & data.keys()):
        draft.note(key, data[key], _LAUNCH)
    section = where.at("deepspeed_config").section(data.get("deepspeed_config"))
    config = _from_file(section, draft, folder) if "deepspeed_config_file" in section else {}
    _merge_keys(section, config, draft)
    _mixed_precision(data, config, draft)
    deepspeed.translate(config, draft)
    _processes(data, draft, where)


def _check_type(data: dict[str, Any], where: KeyLocation) -> None:
    kind = data.get("distributed_type")
    if kind is None and "deepspeed_config" in data:
        return
    if not isinstance(kind, str) or kind.upper() != "DEEPSPEED":
        raise where.at("distributed_type").error(kind, "expected DEEPSPEED, the only type that is ZeRO")


def _refuse(data: dict[str, Any], draft: ConfigDraft) -> None:
    for key, feature in _FEATURES.items():
        if key in data and switched_on(data[key]):
            raise draft.where(key).error(data[key], f"asks for {feature}, which shardwise does not do; remove it")
        if key in data:
            draft.note(key, data[key], "off")
    parallelism = draft.where("parallelism_config").section(data.get("parallelism_config"))
    names = {"tp": "tensor parallelism", "sp": "sequence parallelism", "cp": "context parallelism"}
    names["dp_replicate"] = "replicas of sharded groups (HSDP)"
    for short, feature in names.items():
        key = f"parallelism_config_{short}_size"
        if switched_on(parallelism.get(key)):
            raise draft.where(f"parallelism_config.{key}").error(
                parallelism[key], f"asks for {feature}, which shardwise does not do; remove it"
            )
    if parallelism:
        draft.note("parallelism_config", parallelism, "no effect: only the data-parallel axis is larger than 1")


def _from_file(section: dict[str, Any], draft: ConfigDraft, folder: Path) -> dict[str, Any]:
    """The DeepSpeed configuration that the YAML names: a path or, as in Accelerate, JSON or base64 of JSON."""
    where = draft.where("deepspeed_config.deepspeed_config_file")
    named = where.read(text, section["deepspeed_config_file"])
    source = f"{draft.source}: deepspeed_config_file"
    if named.lstrip().startswith("{"):
        return read_text(named, source)
    for path in (folder / named, Path(named)):
        if os.path.isfile(path):
            draft.prefix = f"{named}: "
            draft.note("deepspeed_config.deepspeed_config_file", named, "read in its place")
            return read_file(path)
    try:
        return read_text(base64.b64decode(named, validate=True).decode(), source)
    except ValueError:  # not base64, not UTF-8, or a ConfigError
        message = "no such file in the YAML's folder or the working directory; it holds the configuration"
        raise where.error(named, message) from None


def _merge_keys(section: dict[str, Any], config: dict[str, Any], draft: ConfigDraft) -> None:
    """Merge the other keys of deepspeed_config into the file's."""
    in_file = draft.prefix
    for key, value in section.items():
        path = f"deepspeed_config.{key}"
        if key in _DEEPSPEED_LAUNCHER:
            draft.notes.append(_note(path, value, _DEEPSPEED_LAUNCHER[key]))
        elif key in _TRANSLATED or key in deepspeed.KEYS:
            _merge(config, _TRANSLATED.get(key, key), value, path, draft)
        elif key != "deepspeed_config_file":
            known = [*_TRANSLATED, *_DEEPSPEED_LAUNCHER, *deepspeed.KEYS, "deepspeed_config_file"]
            raise KeyLocation(draft.source, path).error(value, f"unknown key of deepspeed_config{nearest(key, known)}")
    if not in_file:
        draft.prefix = "deepspeed_config."


def _note(key: str, value: object, effect: str) -> KeyNote:
    """A note on a key of the YAML itself, without the prefix of translated keys."""
    return KeyNote(key, shown(value), effect)


def _merge(config: dict[str, Any], target: str, value: Any, path: str, draft: ConfigDraft) -> None:
    """Set `target` (such as "zero_optimization.stage"); a value that is already there must be equal."""
    if isinstance(value, dict) and isinstance(config.get(target), dict):
        for key, inner in value.items():
            _merge(config, f"{target}.{key}", inner, f"{path}.{key}", draft)
        return
    *parents, leaf = target.split(".")
    node = config
    for parent in parents:
        child = node.setdefault(parent, {})
        node[parent] = child = dict(KeyLocation(draft.source, target).section(child))
        node = child
    present = node.get(leaf)
    if present not in (None, "auto", value):
        raise KeyLocation(draft.source, path).error(value, f"contradicts {target} = {present!r}; keep one of the two")
    node[leaf] = value
    draft.aliases[target] = path


def _mixed_precision(data: dict[str, Any], config: dict[str, Any], draft: ConfigDraft) -> None:
    """Apply mixed_precision where the DeepSpeed configuration leaves it open; a contradiction is an error."""
    legacy = "fp16" if switched_on(data.get("fp16")) else None
    value = data.get("mixed_precision", legacy)
    if value is None:
        return
    where = draft.where() if "mixed_precision" not in data else KeyLocation(draft.source, "mixed_precision")
    if value is False:  # YAML 1.1 reads a bare `no` as false
        value = "no"
    chosen = where.read(choice("no", "fp16", "bf16", "fp8"), value)
    if chosen == "fp8":
        raise where.error(value, "asks for fp8, which shardwise does not do; use bf16 or fp16")
    if chosen == "no":
        draft.notes.append(_note("mixed_precision", value, "fp32, unless deepspeed_config sets a precision"))
        return
    for name in ("fp16", "bf16"):
        section = dict(KeyLocation(draft.source, name).section(config.get(name)))
        present = section.get("enabled")
        wanted = name == chosen
        if present not in (None, "auto") and where.read(flag, present) != wanted and (wanted or present):
            raise where.error(
                value, f"contradicts {name}.enabled = {str(present).lower()} of the DeepSpeed configuration"
            )
        if wanted:
            config[name] = section | {"enabled": True}
            draft.aliases[f"{name}.enabled"] = "mixed_precision"


def _processes(data: dict[str, Any], draft: ConfigDraft, where: KeyLocation) -> None:
    """Read use_cpu and num_processes, and check the batch triple for that number of ranks."""
    if data.get("use_cpu") is not None:
        use_cpu = where.at("use_cpu").read(flag, data["use_cpu"])
        draft.set("runtime.use_cpu", use_cpu, ValueOrigin("file", "use_cpu"))
    given = data.get("num_processes")
    if given is None or given == -1:
        return
    place = KeyLocation(draft.source, "num_processes")
    world_size = place.read(whole, given)
    if world_size < 1:
        raise place.error(given, "expected a whole number >= 1")
    draft.notes.append(
        _note("num_processes", given, f"W = {world_size}, for the launcher: shardwise run -n {world_size}")
    )
    names = ("accumulation", "micro_batch_size", "global_batch_size")
    batch = {name: draft.values[f"batch.{name}"] for name in names if f"batch.{name}" in draft.values}
    if all(batch.values()):
        _check_batch(batch, world_size, place)


def _check_batch(batch: dict[str, int], world_size: int, where: KeyLocation) -> None:
    try:
        Batch(**batch).resolve(world_size)
    except ConfigError as error:
        raise where.error(world_size, str(error)) from None
    except ValueError:
        return  # validation of the sections reports it with the key
