"""Our own dialect: the sections of `Config` by name, a `preset` below them, `deterministic` as a shorthand."""

from typing import Any

from shardwise.config.config import Config
from shardwise.config.draft import Draft, Origin
from shardwise.config.paths import subsection
from shardwise.config.presets import NVME_FOLDER, PRESETS
from shardwise.config.sections import Placement, Section
from shardwise.config.values import Where, nearest, one_of

KEYS = frozenset(Config.model_fields) | {"preset", "deterministic"}

_OWN_AUTO = {"runtime.units", "offload.device_memory", "offload.host_memory"}  # elsewhere auto leaves the default


def translate(data: dict[str, Any], draft: Draft) -> None:
    """Write a native mapping into the draft: first the preset, then what overrides it."""
    given = dict(data)
    where = draft.where()
    preset = given.pop("preset", None)
    if preset is not None:
        apply_preset(preset, draft, where.at("preset"))
    if "deterministic" in given:
        _set_shorthand(given, where)
    _flatten(Config, given, draft, where)


def apply_preset(name: object, draft: Draft, where: Where) -> None:
    """Write the placements of a preset into the draft."""
    row = PRESETS.get(name) if isinstance(name, str) else None
    if row is None:
        raise where.error(name, f"expected {one_of(PRESETS)}{nearest(str(name), PRESETS)}")
    origin = Origin("preset", str(name))
    set_placement(row, draft, origin)
    if "disk" in (row.weights.tier, row.optim.tier):
        draft.set("offload.nvme_path", NVME_FOLDER, origin)


def set_placement(row: Placement, draft: Draft, origin: Origin) -> None:
    """Write a whole row of the placement table."""
    for kind in ("weights", "grads", "optim"):
        own = getattr(row, kind)
        draft.set(f"placement.{kind}.sharding", own.sharding, origin)
        draft.set(f"placement.{kind}.tier", own.tier, origin)


def _set_shorthand(given: dict[str, Any], where: Where) -> None:
    value = given.pop("deterministic")
    gradients = where.at("gradients").section(_as_mapping(given.get("gradients")))
    if gradients.get("deterministic", value) != value:
        raise where.at("deterministic").error(value, "contradicts gradients.deterministic; keep one of the two")
    given["gradients"] = gradients | {"deterministic": value}


def _flatten(section: type[Section], data: dict[str, Any], draft: Draft, where: Where) -> None:
    for key, value in data.items():
        field = section.model_fields.get(key)
        here = where.at(key)
        if field is None:
            raise here.error(value, f"unknown key{nearest(key, [*section.model_fields, *_extra_keys(where)])}")
        inner = subsection(field)
        if inner is None and value == "auto" and here.path not in _OWN_AUTO:
            draft.origins[here.path] = Origin("auto", here.path)
        elif inner is None:
            draft.set(here.path, value, Origin("file", here.path))
        elif value is not None:
            _flatten(inner, here.section(_as_mapping(value)), draft, here)


def _extra_keys(where: Where) -> list[str]:
    return [] if where.path else ["preset", "deterministic"]


def _as_mapping(value: object) -> object:
    return value.model_dump(exclude_unset=True) if isinstance(value, Section) else value
