"""DeepSpeed's JSON, translated unchanged.

Each key is looked up in the tables of `deepspeed_keys.py`. Its effect, or why it has none, is noted for `explain()`.
An unknown key is a warning at the top level, because DeepSpeed ignores it and real files have some. Inside a section
it is an error, because there it is usually a typing mistake.
"""

from collections.abc import Mapping
from typing import Any

from shardwise.config.dialects import deepspeed_keys as ds
from shardwise.config.dialects.deepspeed_keys import KeyRule, switched_on
from shardwise.config.draft import ConfigDraft, ValueOrigin
from shardwise.config.presets import STAGES, offloaded
from shardwise.config.sections import Tier
from shardwise.config.values import choice, flag, left_open_out, nearest, one_of, real, text
from shardwise.errors import ConfigError
from shardwise.sizes import whole

KEYS = frozenset(ds.TOP) | set(ds.TOP_ALIASES) | set(ds.FEATURES) | set(ds.MONITORS) | set(ds.SECTIONS)

_TIERS: dict[str, Tier] = {"none": "device", "cpu": "host", "nvme": "disk"}


def translate(data: Mapping[str, Any], draft: ConfigDraft) -> None:
    """Write a DeepSpeed configuration into the draft."""
    config = _canonical(data, ds.TOP_ALIASES, "", draft)
    _warn_of_unknown(config, draft)
    _refuse(config, ds.FEATURES, "", draft)
    for key in ds.MONITORS:
        _monitor(config, key, draft)
    element_bytes = _precision(config, draft)
    _apply({key: value for key, value in config.items() if key in ds.TOP}, ds.TOP, "", draft)
    _zero(config, element_bytes, draft)
    _optimizer(config.get("optimizer"), draft)
    _scheduler(config.get("scheduler"), draft)
    _other_sections(config, draft)


def _canonical(
    section: Mapping[str, Any], aliases: Mapping[str, tuple[str, bool]], prefix: str, draft: ConfigDraft
) -> dict[str, Any]:
    """The section under current key names. A deprecated name warns; two names with different values are an error."""
    result: dict[str, Any] = {}
    for key, value in section.items():
        name, deprecated = aliases.get(key, (key, False))
        if deprecated:
            draft.warn(prefix + key, value, f"is deprecated, use {name}")
        if name in result and result[name] != value:
            raise draft.where(prefix + key).error(value, f"contradicts {name} = {result[name]!r}; keep one of the two")
        if name != key:
            draft.aliases.setdefault(prefix + name, draft.where(prefix + key).path)
        result[name] = value
    return result


def _apply(
    section: Mapping[str, Any], rules: Mapping[str, KeyRule], prefix: str, draft: ConfigDraft, element_bytes: int = 1
) -> None:
    """Read each key of a section by its rule."""
    for key, value in section.items():
        path = prefix + key
        rule = rules.get(key)
        if rule is None:
            raise _unknown_key(prefix, key, value, rules, draft)
        if value is None or value == "auto":
            _leave_open(rule, path, value, draft)
            continue
        result = draft.where(path).read(rule.read, value)
        if rule.in_elements and rule.target and result is not None:
            result *= element_bytes
        if rule.keep_larger and rule.target in draft.values:
            result = max(result, draft.values[rule.target])
        if rule.target:
            draft.set(rule.target, result, ValueOrigin("file", draft.where(path).path))
        draft.note(path, value, f"{rule.target}: {rule.effect}" if rule.target else rule.effect)


def _unknown_key(prefix: str, key: str, value: object, rules: Mapping[str, KeyRule], draft: ConfigDraft) -> ConfigError:
    known = [*rules, *ds.READ_BY_CODE.get(prefix.rstrip("."), ())]
    return draft.where(prefix + key).error(value, f"unknown key{nearest(key, known)}")


def _leave_open(rule: KeyRule, path: str, value: object, draft: ConfigDraft) -> None:
    draft.note(path, value, "the library's own default" if value == "auto" else "as if it were absent")
    if rule.target and value == "auto":
        draft.origins.setdefault(rule.target, ValueOrigin("auto", f"auto {draft.where(path).path}"))


def _refuse(section: Mapping[str, Any], features: Mapping[str, str], prefix: str, draft: ConfigDraft) -> None:
    """Raise for features outside ZeRO that are on; note those that are off."""
    for key, feature in features.items():
        if key not in section:
            continue
        if switched_on(section[key]):
            message = f"asks for {feature}, which shardwise does not do; remove it or switch it off"
            raise draft.where(prefix + key).error(section[key], message)
        draft.note(prefix + key, section[key], f"off ({feature} is not supported)")


def _without(section: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key not in keys}


def _warn_of_unknown(config: Mapping[str, Any], draft: ConfigDraft) -> None:
    for key in config:
        if key not in KEYS:
            draft.warn(key, config[key], f"unknown key, ignored as DeepSpeed does{nearest(key, KEYS)}")


def _monitor(config: Mapping[str, Any], key: str, draft: ConfigDraft) -> None:
    if key in config and switched_on(config[key]):
        draft.warn(key, config[key], "no effect: shardwise writes no such logs; see engine.report()")
    elif key in config:
        draft.note(key, config[key], "off")


def _precision(config: Mapping[str, Any], draft: ConfigDraft) -> int:
    """Read fp16, bf16, torch_autocast and data_types. Returns the bytes of a weight."""
    on = {
        "fp16": _half(config, "fp16", ds.FP16, ds.FP16_FEATURES, draft),
        "bf16": _half(config, "bf16", ds.BF16, ds.BF16_FEATURES, draft),
        "torch_autocast": _autocast(config, draft),
    }
    chosen = [name for name, enabled in on.items() if enabled]
    if len(chosen) > 1:
        message = f"{chosen[0]}.enabled is true as well; switch one of the two off"
        raise draft.where(f"{chosen[1]}.enabled").error(True, message)
    _apply(draft.where("data_types").section(config.get("data_types")), ds.DATA_TYPES, "data_types.", draft)
    return 2 if on["fp16"] or on["bf16"] else 4


def _half(
    config: Mapping[str, Any], name: str, rules: Mapping[str, KeyRule], features: Mapping[str, str], draft: ConfigDraft
) -> bool:
    section = draft.where(name).section(config.get(name))
    prefix = f"{name}."
    _refuse(section, features, prefix, draft)
    rest = _without(section, "enabled", *features)
    enabled = _enabled(section, prefix, draft)
    if enabled:
        draft.set("precision.compute", name, ValueOrigin("file", draft.where(f"{name}.enabled").path))
        if name == "fp16":
            _loss_scale(rest, draft)
        _apply(_without(rest, "loss_scale") if name == "fp16" else rest, rules, prefix, draft)
        return True
    for key, value in rest.items():
        if key not in rules and key != "loss_scale":
            raise _unknown_key(prefix, key, value, rules, draft)
        draft.note(prefix + key, value, f"no effect: {name} is off")
    return False


def _enabled(section: Mapping[str, Any], prefix: str, draft: ConfigDraft) -> bool:
    value = section.get("enabled")
    if "enabled" not in section:
        return False
    if value is None or value == "auto":
        draft.note(f"{prefix}enabled", value, "the library's own default (off)")
        origin = ValueOrigin("auto", f"auto {draft.where(prefix + 'enabled').path}")
        draft.origins.setdefault("precision.compute", origin)
        return False
    enabled = draft.where(f"{prefix}enabled").read(flag, value)
    draft.note(f"{prefix}enabled", value, f"computes in {prefix[:-1]}" if enabled else "off")
    return enabled


def _loss_scale(section: dict[str, Any], draft: ConfigDraft) -> None:
    """Read loss_scale: 0 is a dynamic scale, any other value a constant one, under which other keys have no effect."""
    value = section.get("loss_scale")
    if value is None or value == "auto":
        return
    scale = draft.where("fp16.loss_scale").read(real, value)
    if scale == 0:
        draft.note("fp16.loss_scale", value, "the scale is dynamic")
        return
    origin = ValueOrigin("file", draft.where("fp16.loss_scale").path)
    draft.set("precision.loss_scale.dynamic", False, origin)
    draft.set("precision.loss_scale.initial", scale, origin)
    draft.note("fp16.loss_scale", value, "the scale is constant")
    power = section.pop("initial_scale_power", None)
    if power is not None:
        draft.note("fp16.initial_scale_power", power, "no effect: the scale is constant")


def _autocast(config: Mapping[str, Any], draft: ConfigDraft) -> bool:
    section = draft.where("torch_autocast").section(config.get("torch_autocast"))
    enabled = draft.where("torch_autocast.enabled").read(flag, section.get("enabled", False) or False)
    compute = section.get("dtype")
    chosen = draft.where("torch_autocast.dtype").read(ds.dtype, "bf16" if compute in (None, "auto") else compute)
    _apply(_without(section, "enabled", "dtype"), ds.TORCH_AUTOCAST, "torch_autocast.", draft)
    if enabled:
        draft.set("precision.autocast", True, ValueOrigin("file", draft.where("torch_autocast.enabled").path))
        draft.set("precision.compute", chosen, ValueOrigin("file", draft.where("torch_autocast.dtype").path))
    if section:
        draft.note("torch_autocast", section, "fp32 weights, torch.autocast per operation" if enabled else "off")
    return enabled


def _zero(config: Mapping[str, Any], element_bytes: int, draft: ConfigDraft) -> None:
    value = config.get("zero_optimization")
    if isinstance(value, bool):
        draft.warn("zero_optimization", value, "is deprecated as a flag, use a section with a stage")
        value = {"stage": int(value)}
    given = draft.where("zero_optimization").section(value)
    section = _canonical(given, ds.ZERO_ALIASES, "zero_optimization.", draft)
    _refuse(section, ds.ZERO_FEATURES, "zero_optimization.", draft)
    section = _legacy_offload(_without(section, *ds.ZERO_FEATURES), draft)
    tiers = {
        name: _offload(section.get(name), name, element_bytes, draft) for name in ("offload_param", "offload_optimizer")
    }
    _place(section, tiers, draft)
    if "aio" in section:
        _aio(section["aio"], "zero_optimization.aio", draft)
    rest = _without(section, "stage", "aio", *tiers)
    _apply(rest, ds.ZERO, "zero_optimization.", draft, element_bytes)


def _legacy_offload(section: dict[str, Any], draft: ConfigDraft) -> dict[str, Any]:
    """Rewrite cpu_offload and similar keys, which preceded the offload sections."""
    section = dict(section)
    legacy = {
        "cpu_offload": "offload_optimizer",
        "cpu_offload_params": "offload_param",
        "cpu_offload_param": "offload_param",
    }
    pin = section.pop("cpu_offload_use_pin_memory", None)
    for key, name in legacy.items():
        if key not in section:
            continue
        path = f"zero_optimization.{key}"
        value = section.pop(key)
        draft.warn(path, value, f"is deprecated, use {name}: {{device: cpu}}")
        if value not in (None, "auto") and draft.where(path).read(flag, value):
            draft.aliases.setdefault(f"zero_optimization.{name}.device", draft.where(path).path)
            section.setdefault(name, {"device": "cpu"} | ({} if pin is None else {"pin_memory": pin}))
    if pin is not None:
        draft.warn("zero_optimization.cpu_offload_use_pin_memory", pin, "is deprecated, use pin_memory")
    return section


def _offload(value: object, name: str, element_bytes: int, draft: ConfigDraft) -> Tier:
    """Read one of the two offload sections; returns its tier."""
    path = f"zero_optimization.{name}"
    section = draft.where(path).section(value)
    _refuse(section, ds.OFFLOAD_FEATURES, f"{path}.", draft)
    device = section.get("device")
    if device in (None, "auto"):
        tier = _TIERS["none"]
    else:
        tier = _TIERS[draft.where(f"{path}.device").read(choice(*_TIERS), device)]
    if "device" in section:
        draft.note(f"{path}.device", device, "rests on the device" if tier == "device" else f"rests on the {tier} tier")
    _nvme_path(section, path, tier, draft)
    rules = ds.OFFLOAD_PARAM if name == "offload_param" else ds.OFFLOAD_OPTIMIZER
    rest = _without(section, "device", "nvme_path", *ds.OFFLOAD_FEATURES)
    if tier == "device":
        _apply(
            rest,
            {key: KeyRule(rule.read, "no effect: nothing is offloaded") for key, rule in rules.items()},
            f"{path}.",
            draft,
        )
    else:
        _apply(rest, rules, f"{path}.", draft, element_bytes)
    return tier


def _nvme_path(section: Mapping[str, Any], path: str, tier: Tier, draft: ConfigDraft) -> None:
    folder = section.get("nvme_path")
    where = draft.where(f"{path}.nvme_path")
    given = None if folder is None or folder in ("none", "auto") else where.read(text, folder)
    if tier != "disk":
        if "nvme_path" in section:
            draft.note(f"{path}.nvme_path", folder, "no effect: the device is not nvme")
        return
    if given is None:
        raise where.error(folder, "device nvme needs the path of a folder on the NVMe disk")
    target = "offload.weights_nvme_path" if path.endswith("offload_param") else "offload.nvme_path"
    draft.set(target, given, ValueOrigin("file", where.path))
    draft.note(f"{path}.nvme_path", folder, "folder for states on disk")


def _place(section: Mapping[str, Any], tiers: Mapping[str, Tier], draft: ConfigDraft) -> None:
    stage, where = section.get("stage", 0), draft.where("zero_optimization.stage")
    if stage is None or stage == "auto":
        draft.note("zero_optimization.stage", stage, "the library's own default (0)")
        stage = 0
    number = where.read(whole, stage)
    if number >= len(STAGES):
        raise where.error(stage, "expected a stage from 0 to 3")
    row = STAGES[number]
    for name, kind in (("offload_param", row.weights), ("offload_optimizer", row.optim)):
        if tiers[name] != "device" and kind.sharding == "replicated":
            raise draft.where(f"zero_optimization.{name}.device").error(
                section[name]["device"],
                f"only sharded states can be offloaded, and stage {number} replicates these; "
                + (
                    "offloaded weights need stage 3"
                    if name == "offload_param"
                    else "an offloaded optimizer needs stage 1"
                ),
            )
    origin = ValueOrigin("file", where.path) if "stage" in section else ValueOrigin("default")
    draft.set_placement(offloaded(row, weights=tiers["offload_param"], optim=tiers["offload_optimizer"]), origin)
    for name, path in (("offload_param", "placement.weights.tier"), ("offload_optimizer", "placement.optim.tier")):
        if name in section:
            draft.origins[path] = ValueOrigin("file", draft.where(f"zero_optimization.{name}.device").path)
    if draft.values["placement.grads.tier"] != "device":
        draft.origins["placement.grads.tier"] = ValueOrigin("derived", "from optim")
    draft.note("zero_optimization.stage", section.get("stage", 0), f"the placements of zero{number}")


def _aio(value: object, path: str, draft: ConfigDraft) -> None:
    section = draft.where(path).section(value)
    _refuse(section, ds.AIO_FEATURES, f"{path}.", draft)
    _apply(_without(section, *ds.AIO_FEATURES), ds.AIO, f"{path}.", draft)


def _other_sections(config: Mapping[str, Any], draft: ConfigDraft) -> None:
    if "aio" in config:
        _aio(config["aio"], "aio", draft)
    for name, rules in (
        ("activation_checkpointing", ds.ACTIVATION_CHECKPOINTING),
        ("checkpoint", ds.CHECKPOINT),
        ("shardwise", ds.SHARDWISE),
    ):
        section = draft.where(name).section(config.get(name))
        local = section.get("use_node_local_storage") if name == "checkpoint" else None
        if local is not None:
            effect = "no effect: all ranks write into one folder, which all nodes must reach"
            (draft.warn if switched_on(local) else draft.note)(f"{name}.use_node_local_storage", local, effect)
        _apply(_without(section, "use_node_local_storage"), rules, f"{name}.", draft)
    compiled = draft.where("compile").section(config.get("compile"))
    _refuse(compiled, ds.COMPILE_FEATURES, "compile.", draft)
    for key, value in _without(compiled, *ds.COMPILE_FEATURES).items():
        draft.note(f"compile.{key}", value, "no effect: call torch.compile on the model instead")


def _optimizer(value: object, draft: ConfigDraft) -> None:
    """Translate the optimizer section."""
    if value is None:
        return
    section = draft.where("optimizer").section(value)
    _only(section, ("type", "params", "legacy_fusion"), "optimizer", draft)
    where = draft.where("optimizer.type")
    given = where.read(text, section.get("type"))
    if given.lower() in ds.OPTIMIZER_FEATURES:
        message = f"asks for {ds.OPTIMIZER_FEATURES[given.lower()]}, which shardwise does not do; use AdamW"
        raise where.error(given, message)
    raw = draft.where("optimizer.params").section(section.get("params"))
    params = _given(raw, "optimizer.params", draft)
    name = _adam(given, params, draft)
    for key in ds.OPTIMIZER_NO_EFFECT.keys() & params.keys():
        draft.note(f"optimizer.params.{key}", params.pop(key), ds.OPTIMIZER_NO_EFFECT[key])
    if "legacy_fusion" in section:
        draft.note("optimizer.legacy_fusion", section["legacy_fusion"], "no effect: a setting of Apex")
    draft.set("optimizer.name", name, ValueOrigin("file", where.path))
    draft.set("optimizer.params", params, ValueOrigin("file", draft.where("optimizer.params").path))


def _adam(given: str, params: dict[str, Any], draft: ConfigDraft) -> str:
    """The name of DeepSpeed's Adam in torch: AdamW unless adam_w_mode is false. Its default weight decay is 0."""
    name = ds.OPTIMIZER_NAMES.get(given.lower(), given)
    if name not in ("Adam", "AdamW"):
        return name
    params.setdefault("weight_decay", 0.0)
    where = draft.where("optimizer.params.adam_w_mode")
    decoupled = name == "AdamW" or where.read(flag, params.get("adam_w_mode", True))
    if name == "Adam" and decoupled:
        draft.note(
            "optimizer.type", given, "AdamW: DeepSpeed's Adam decouples the weight decay unless adam_w_mode is false"
        )
    return "AdamW" if decoupled else "Adam"


def _scheduler(value: object, draft: ConfigDraft) -> None:
    """Translate the scheduler section."""
    if value is None:
        return
    section = draft.where("scheduler").section(value)
    _only(section, ("type", "params"), "scheduler", draft)
    if section.get("type") is None:
        return
    raw = draft.where("scheduler.params").section(section.get("params"))
    params = _given(raw, "scheduler.params", draft)
    peak = draft.values.get("optimizer.params", {}).get("lr")
    if raw.get("warmup_max_lr") == "auto" and peak is not None:
        params["warmup_max_lr"] = peak
        draft.note("scheduler.params.warmup_max_lr", peak, "from optimizer.params.lr")
    where = draft.where("scheduler.type")
    draft.set("scheduler.name", where.read(text, section["type"]), ValueOrigin("file", where.path))
    draft.set("scheduler.params", params, ValueOrigin("file", draft.where("scheduler.params").path))


def _given(params: dict[str, Any], path: str, draft: ConfigDraft) -> dict[str, Any]:
    """The params that are neither auto nor null."""
    for key, value in params.items():
        if value is None or value == "auto":
            draft.note(f"{path}.{key}", value, "left open: an argument or the default decides")
    return left_open_out(params)


def _only(section: dict[str, Any], allowed: tuple[str, ...], path: str, draft: ConfigDraft) -> None:
    for key in section:
        if key not in allowed:
            message = f"unknown key, expected {one_of(allowed)}{nearest(key, allowed)}"
            raise draft.where(f"{path}.{key}").error(section[key], message)
