"""DeepSpeed's JSON, translated unchanged.

Each key is looked up in the tables of `deepspeed_keys.py`. Its effect, or why it has none, is noted for `explain()`.
An unknown key is a warning at the top level, because DeepSpeed ignores it and real files have some. Inside a section
it is an error, because there it is usually a typing mistake.
"""

from collections.abc import Mapping
from typing import Any

from shardwise.config.dialects import deepspeed_keys as ds
from shardwise.config.dialects.rules import FileSection, KeyRule, Rules, without_effect
from shardwise.config.draft import AutoKey, ConfigDraft, ValueOrigin
from shardwise.config.presets import PRESETS, STAGES, offloaded
from shardwise.config.sections import Placement, Tier
from shardwise.config.values import any_value, choice, flag, is_open, nearest, real, text
from shardwise.errors import ConfigError
from shardwise.sizes import whole

KEYS = frozenset(ds.TOP)

_TIERS: dict[str, Tier] = {"none": "device", "cpu": "host", "nvme": "disk"}


def translate(data: dict[str, Any], draft: ConfigDraft) -> None:
    """Write a DeepSpeed configuration into the draft.

    Where fp16 or bf16 is "auto", the draft also gets what each dtype would set.
    """
    _translate(data, draft)
    open_keys = [auto.key for auto in draft.autos if auto.target == "precision.compute"]
    draft.autos = [auto for auto in draft.autos if auto.target != "precision.compute"]
    if open_keys and "precision.compute" not in draft.values:
        current = FileSection(ConfigDraft(draft.source, warns=False), "", data).canonical(ds.TOP).data
        choices = {name: _choice(current, draft, name) for name in ds.HALVES if _may_be_on(current, name)}
        draft.autos += [AutoKey(key, "precision.compute", choices) for key in open_keys]


def _may_be_on(data: dict[str, Any], name: str) -> bool:
    """Whether the file does not switch fp16 or bf16 off."""
    section = data.get(name)
    return not isinstance(section, dict) or is_open(section.get("enabled"))


def _choice(data: dict[str, Any], draft: ConfigDraft, name: str) -> dict[str, Any] | ConfigError:
    """What changes, by native path, if the file enables `name` instead of leaving it open."""
    other = {half: {**(data.get(half) or {}), "enabled": half == name} for half in ds.HALVES if half in data}
    chosen = ConfigDraft(draft.source, draft.dialect, warns=False, aliases=dict(draft.aliases), prefix=draft.prefix)
    try:
        _translate({**data, name: {"enabled": True}, **other}, chosen)
    except ConfigError as error:
        return error
    return {path: value for path, value in chosen.values.items() if draft.values.get(path) != value}


def _translate(data: dict[str, Any], draft: ConfigDraft) -> None:
    top = FileSection(draft, "", data).canonical(ds.TOP)
    for key in [key for key in data if key not in KEYS]:
        top.warn(key, f"unknown key, ignored as DeepSpeed does{nearest(key, KEYS)}")
        del top.data[key]
    top.refuse(ds.TOP)
    element_bytes = _precision(top)
    top.apply(ds.TOP)
    _zero(top, element_bytes)
    _optimizer(top)
    _scheduler(top)
    for name in ds.SECTIONS:
        top.inner(name).apply(ds.SECTIONS[name])


def _precision(top: FileSection) -> int:
    """Read fp16, bf16 and torch_autocast. Returns the bytes of a weight."""
    half = [name for name, rules in ds.HALVES.items() if _half(top.inner(name), rules)]
    chosen = half + ["torch_autocast"] * _autocast(top.inner("torch_autocast"))
    if len(chosen) > 1:
        message = f"{chosen[0]}.enabled is true as well; switch one of the two off"
        raise top.draft.error(f"{chosen[1]}.enabled", True, message)
    return 2 if half else 4


def _half(section: FileSection, rules: Rules) -> bool:
    """Read fp16 or bf16. Returns whether it is enabled."""
    name = section.path
    enabled = _enabled(section)
    if not enabled:
        off = KeyRule(any_value, f"no effect: {name} is off")
        rules = rules | {key: off for key, rule in rules.items() if isinstance(rule, KeyRule) and key != "enabled"}
    elif name == "fp16" and _loss_scale_is_constant(section):
        rules = rules | {"initial_scale_power": KeyRule(any_value, "no effect: the scale is constant")}
    section.apply(rules)
    return enabled


def _enabled(section: FileSection) -> bool:
    if section.is_open("enabled"):
        if "enabled" in section.data:
            section.leave_open("enabled", "precision.compute", " (off), or the model's dtype in initialize")
        return False
    enabled = section.read("enabled", flag)
    section.note("enabled", f"computes in {section.path}" if enabled else "off")
    if enabled:
        section.set("enabled", "precision.compute", section.path)
    return enabled


def _loss_scale_is_constant(section: FileSection) -> bool:
    """Read loss_scale: 0 is a dynamic scale, any other value a constant one."""
    if section.is_open("loss_scale"):
        return False
    scale = section.read("loss_scale", real)
    if scale:
        section.set("loss_scale", "precision.loss_scale.dynamic", False)
        section.set("loss_scale", "precision.loss_scale.initial", scale)
    section.note("loss_scale", "the scale is constant" if scale else "the scale is dynamic")
    return scale != 0


def _autocast(section: FileSection) -> bool:
    enabled = section.draft.read(section.at("enabled"), flag, section.data.get("enabled") or False)
    compute = "bf16" if section.is_open("dtype") else section.read("dtype", ds.dtype)
    section.apply(ds.TORCH_AUTOCAST)
    if enabled:
        section.set("enabled", "precision.autocast", True)
        section.set("dtype", "precision.compute", compute)
    if section.data:
        effect = "fp32 weights, torch.autocast per operation" if enabled else "off"
        section.draft.note("torch_autocast", section.data, effect)
    return enabled


def _zero(top: FileSection, element_bytes: int) -> None:
    value = top.data.get("zero_optimization")
    if isinstance(value, bool):
        top.warn("zero_optimization", "is deprecated as a flag, use a section with a stage")
        top.data["zero_optimization"] = {"stage": int(value)}
    section = top.inner("zero_optimization").canonical(ds.ZERO)
    section.refuse(ds.ZERO)
    _rewrite_legacy_offload(section)
    stage = 0 if section.is_open("stage") else section.read("stage", whole)
    if stage >= len(STAGES):
        raise section.error("stage", "expected a stage from 0 to 3")
    tiers = {
        name: _offload(section.inner(name), rules, element_bytes, _why_not_offloaded(name, stage))
        for name, rules in (("offload_param", ds.OFFLOAD_PARAM), ("offload_optimizer", ds.OFFLOAD_OPTIMIZER))
    }
    _place(section, stage, tiers)
    section.inner("aio").apply(ds.SECTIONS["aio"])
    section.apply(ds.ZERO, element_bytes)


def _rewrite_legacy_offload(section: FileSection) -> None:
    """Replace cpu_offload and similar keys, which preceded the offload sections."""
    optimizer, param = "offload_optimizer", "offload_param"
    legacy = {"cpu_offload": optimizer, "cpu_offload_params": param, "cpu_offload_param": param}
    pin = section.data.get("cpu_offload_use_pin_memory")
    if pin is not None:
        section.warn("cpu_offload_use_pin_memory", "is deprecated, use pin_memory")
    for key in [key for key in legacy if key in section.data]:
        section.warn(key, f"is deprecated, use {legacy[key]}: {{device: cpu}}")
        if not section.is_open(key) and section.read(key, flag):
            path = section.draft.own_path(section.at(key))
            section.draft.aliases.setdefault(f"zero_optimization.{legacy[key]}.device", path)
            section.data.setdefault(legacy[key], {"device": "cpu"} | ({} if pin is None else {"pin_memory": pin}))
    for key in (*legacy, "cpu_offload_use_pin_memory"):
        section.data.pop(key, None)


def _why_not_offloaded(name: str, stage: int) -> str:
    """Why an offload section has no effect under a stage; empty where it has one."""
    kind, least = ("weights", 3) if name == "offload_param" else ("optim", 1)
    if getattr(STAGES[stage], kind).sharding == "sharded":
        return ""
    return f"stage {stage} replicates these states, and only sharded ones can be offloaded (from stage {least} on)"


def _offload(section: FileSection, rules: Rules, element_bytes: int, why_not: str) -> Tier:
    """Read one of the two offload sections. Returns its tier."""
    tier = _TIERS["none" if section.is_open("device") else section.read("device", choice(*_TIERS))]
    if why_not and tier != "device":
        section.warn("device", f"no effect, as in DeepSpeed: {why_not}")
        tier = "device"
    elif "device" in section.data:
        section.note("device", "rests on the device" if tier == "device" else f"rests on the {tier} tier")
    if tier == "device":
        rules = without_effect(rules, "nothing is offloaded")
    elif tier == "host":
        rules = rules | {"nvme_path": KeyRule(text, "no effect: the device is not nvme")}
    elif section.is_open("nvme_path") or section.data["nvme_path"] == "none":
        raise section.error("nvme_path", "device nvme needs the path of a folder on the NVMe disk")
    section.apply(rules, element_bytes)
    return tier


def _place(section: FileSection, stage: int, tiers: Mapping[str, Tier]) -> None:
    draft, row = section.draft, _row(section, stage)
    stage_path = draft.own_path("zero_optimization.stage")
    origin = ValueOrigin("file", stage_path) if "stage" in section.data else ValueOrigin("default")
    draft.set_placement(offloaded(row, weights=tiers["offload_param"], optim=tiers["offload_optimizer"]), origin)
    for name, kind in (("offload_param", "weights"), ("offload_optimizer", "optim")):
        if name in section.data:
            section.inner(name).set("device", f"placement.{kind}.tier", tiers[name])
    if draft.values["placement.grads.tier"] != "device":
        draft.origins["placement.grads.tier"] = ValueOrigin("derived", "from optim")
    draft.note("zero_optimization.stage", section.data.get("stage", 0), f"the placements of zero{stage}")


def _row(section: FileSection, stage: int) -> Placement:
    """The row of a stage; with a second partition inside each node (hpZ), the hybrid one."""
    key = "zero_hpz_partition_size"
    size = 1 if section.is_open(key) else section.read(key, whole)
    if size <= 1 or stage < len(STAGES) - 1:
        if key in section.data:
            section.note(key, "off" if size <= 1 else f"no effect: stage {stage} replicates the weights")
        return STAGES[stage]
    section.set(key, "communication.ranks_per_node", size)
    section.note(key, "communication.ranks_per_node: weights rest sharded over a node, as in zero3_hybrid")
    return PRESETS["zero3_hybrid"]


def _optimizer(top: FileSection) -> None:
    """Translate the optimizer section."""
    if top.data.get("optimizer") is None:
        return
    section = top.inner("optimizer")
    section.apply(ds.OPTIMIZER)
    name = section.read("type", text)
    if name.lower() in ds.OPTIMIZER_FEATURES:
        feature = ds.OPTIMIZER_FEATURES[name.lower()]
        raise section.error("type", f"asks for {feature}, which shardwise does not do; use AdamW")
    params = _given_params(section)
    if name.lower() in ("adam", "adamw"):
        name = _adam(section, params)
    if name.lower() == "lion":
        params = {"lr": 1e-3, "betas": [0.9, 0.999], **params}  # the defaults of DeepSpeed's kernels
    for key in [key for key in params if key in ds.OPTIMIZER_NO_EFFECT]:
        section.inner("params").note(key, ds.OPTIMIZER_NO_EFFECT[key])
        del params[key]
    section.set("type", "optimizer.name", name)
    section.set("params", "optimizer.params", params)


def _adam(section: FileSection, params: dict[str, Any]) -> str:
    """The name of DeepSpeed's Adam in torch: AdamW unless adam_w_mode is false.

    The default weight decay of DeepSpeed's kernels is 0. With `torch_adam` it is torch's: 0.01 for AdamW.
    """
    if not section.draft.read("optimizer.params.torch_adam", flag, params.get("torch_adam", False)):
        params.setdefault("weight_decay", 0.0)
    if section.data["type"].lower() == "adamw":
        return "AdamW"
    if not section.draft.read("optimizer.params.adam_w_mode", flag, params.get("adam_w_mode", True)):
        return "Adam"
    section.note("type", "AdamW: DeepSpeed's Adam decouples the weight decay unless adam_w_mode is false")
    return "AdamW"


def _scheduler(top: FileSection) -> None:
    """Translate the scheduler section."""
    section = top.inner("scheduler")
    section.apply(ds.SCHEDULER)
    if section.data.get("type") is None:
        return
    params = _given_params(section)
    peak = top.draft.values.get("optimizer.params", {}).get("lr")
    if section.inner("params").data.get("warmup_max_lr") == "auto" and peak is not None:
        params["warmup_max_lr"] = peak
        top.draft.note("scheduler.params.warmup_max_lr", peak, "from optimizer.params.lr")
    section.set("type", "scheduler.name", section.read("type", text))
    section.set("params", "scheduler.params", params)


def _given_params(section: FileSection) -> dict[str, Any]:
    """The params of an optimizer or scheduler that are neither auto nor null."""
    params = section.inner("params")
    for key in filter(params.is_open, params.data):
        params.leave_open(key, f"{section.path}.params.{key}", ", or what the optimizer says in initialize")
    return {key: value for key, value in params.data.items() if not is_open(value)}
