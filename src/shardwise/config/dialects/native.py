"""The native dialect: the sections of `Config` by name, a `preset` below them, `deterministic` as a shorthand."""

from typing import Any

from shardwise.config.draft import ConfigDraft, ValueOrigin, subsection
from shardwise.config.presets import NVME_FOLDER, PRESETS
from shardwise.config.sections import ConfigSections, Section
from shardwise.config.values import KeyLocation, nearest, one_of

KEYS = frozenset(ConfigSections.model_fields) | {"preset", "deterministic"}

_OWN_AUTO = {"runtime.units", "offload.device_memory", "offload.host_memory"}  # elsewhere auto keeps the default


def translate(data: dict[str, Any], draft: ConfigDraft) -> None:
    """Write a native mapping into the draft: the preset first, then the sections that override it."""
    given = dict(data)
    where = draft.where()
    preset = given.pop("preset", None)
    if preset is not None:
        apply_preset(preset, draft, where.at("preset"))
    if "deterministic" in given:
        _set_shorthand(given, where)
    _flatten(ConfigSections, given, draft, where)


def apply_preset(name: object, draft: ConfigDraft, where: KeyLocation) -> None:
    """Write the placements of a preset into the draft."""
    row = PRESETS.get(name) if isinstance(name, str) else None
    if row is None:
        raise where.error(name, f"expected {one_of(PRESETS)}{nearest(str(name), PRESETS)}")
    origin = ValueOrigin("preset", str(name))
    draft.set_placement(row, origin)
    if "disk" in (row.weights.tier, row.optim.tier):
        draft.set("offload.nvme_path", NVME_FOLDER, origin)


def _set_shorthand(given: dict[str, Any], where: KeyLocation) -> None:
    value = given.pop("deterministic")
    gradients = where.at("gradients").section(_as_mapping(given.get("gradients")))
    if gradients.get("deterministic", value) != value:
        raise where.at("deterministic").error(value, "contradicts gradients.deterministic; keep one of the two")
    given["gradients"] = gradients | {"deterministic": value}


def _flatten(section: type[Section], data: dict[str, Any], draft: ConfigDraft, where: KeyLocation) -> None:
    for key, value in data.items():
        field = section.model_fields.get(key)
        here = where.at(key)
        if field is None:
            known = [*section.model_fields] if where.path else [*section.model_fields, "preset", "deterministic"]
            raise here.error(value, f"unknown key{nearest(key, known)}")
        inner = subsection(field)
        if inner is None and value == "auto" and here.path not in _OWN_AUTO:
            draft.origins[here.path] = ValueOrigin("auto", here.path)
        elif inner is None:
            draft.set(here.path, value, ValueOrigin("file", here.path))
        elif value is not None:
            _flatten(inner, here.section(_as_mapping(value)), draft, here)


def _as_mapping(value: object) -> object:
    return value.model_dump(exclude_unset=True) if isinstance(value, Section) else value
