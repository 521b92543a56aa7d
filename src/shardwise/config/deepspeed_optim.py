"""DeepSpeed's optimizer and scheduler sections: its names and defaults, which are not torch's."""

from typing import Any

from shardwise.config.draft import Draft, Origin
from shardwise.config.values import flag, left_open_out, nearest, one_of, text

_NAMES = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "lion": "Lion", "adagrad": "Adagrad", "muon": "Muon"}
_REFUSED = {
    "onebitadam": "compressed communication (1-bit Adam)",
    "zerooneadam": "compressed communication (0/1 Adam)",
    "onebitlamb": "compressed communication (1-bit LAMB)",
    "lamb": "LAMB, which is not element-wise",
    "fusedlamb": "LAMB, which is not element-wise",
    "muadam": "µP scaling",
    "muadamw": "µP scaling",
    "musgd": "µP scaling",
}
_NO_EFFECT = {
    "torch_adam": "no effect: it is torch's own kernel in any case",
    "adam_w_mode": "decides between Adam and AdamW",
    "set_grad_none": "no effect: gradients live in flat buffers",
    "fp32_optimizer_states": "no effect: states are fp32",
}


def translate_optimizer(value: object, draft: Draft) -> None:
    """Write DeepSpeed's optimizer section into the draft."""
    if value is None:
        return
    section = draft.where("optimizer").section(value)
    _only(section, ("type", "params", "legacy_fusion"), "optimizer", draft)
    where = draft.where("optimizer.type")
    given = where.read(text, section.get("type"))
    if given.lower() in _REFUSED:
        message = f"asks for {_REFUSED[given.lower()]}, which shardwise does not do; use AdamW"
        raise where.error(given, message)
    raw = draft.where("optimizer.params").section(section.get("params"))
    params = _given(raw, "optimizer.params", draft)
    name = _adam(given, params, draft)
    for key in _NO_EFFECT.keys() & params.keys():
        draft.note(f"optimizer.params.{key}", params.pop(key), _NO_EFFECT[key])
    if "legacy_fusion" in section:
        draft.note("optimizer.legacy_fusion", section["legacy_fusion"], "no effect: a setting of Apex")
    draft.set("optimizer.name", name, Origin("file", where.path))
    draft.set("optimizer.params", params, Origin("file", draft.where("optimizer.params").path))


def _adam(given: str, params: dict[str, Any], draft: Draft) -> str:
    """DeepSpeed's Adam decouples its weight decay unless told otherwise; without one it decays by 0, torch by 0.01."""
    name = _NAMES.get(given.lower(), given)
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


def translate_scheduler(value: object, draft: Draft) -> None:
    """Write DeepSpeed's scheduler section into the draft."""
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
    draft.set("scheduler.name", where.read(text, section["type"]), Origin("file", where.path))
    draft.set("scheduler.params", params, Origin("file", draft.where("scheduler.params").path))


def _given(params: dict[str, Any], path: str, draft: Draft) -> dict[str, Any]:
    """What is neither auto nor null."""
    for key, value in params.items():
        if value is None or value == "auto":
            draft.note(f"{path}.{key}", value, "left open: an argument, or the default")
    return left_open_out(params)


def _only(section: dict[str, Any], allowed: tuple[str, ...], path: str, draft: Draft) -> None:
    for key in section:
        if key not in allowed:
            message = f"unknown key, expected {one_of(allowed)}{nearest(key, allowed)}"
            raise draft.where(f"{path}.{key}").error(section[key], message)
