"""The native dialect: sections as they are, with a preset below them and a few shorthands."""

from typing import Any

from shardwise.config.draft import ConfigDraft, ValueOrigin, subsection
from shardwise.config.presets import PRESETS, disk_folder
from shardwise.config.sections import ConfigSections, Section
from shardwise.config.values import nearest, one_of

KEYS = frozenset(ConfigSections.model_fields) | {"preset", "deterministic"}
_OWN_AUTO = {"runtime.units", "offload.device_memory", "offload.host_memory"}  # elsewhere auto keeps the default


def translate(data: dict[str, Any], draft: ConfigDraft) -> None:
    """Write a native mapping into the draft: the preset first, then the sections that override it."""
    given = dict(data)
    preset = given.pop("preset", None)
    if preset is not None:
        apply_preset(preset, draft)
    if "deterministic" in given:
        value = given.pop("deterministic")
        gradients = draft.section("gradients", _as_mapping(given.get("gradients")))
        if gradients.get("deterministic", value) != value:
            raise draft.error("deterministic", value, "contradicts gradients.deterministic; keep one of the two")
        given["gradients"] = gradients | {"deterministic": value}
    _flatten(ConfigSections, given, draft)


def apply_preset(name: object, draft: ConfigDraft) -> None:
    """Write the placements of a preset into the draft."""
    row = PRESETS.get(name) if isinstance(name, str) else None
    if row is None:
        raise draft.error("preset", name, f"expected {one_of(PRESETS)}{nearest(str(name), PRESETS)}")
    origin = ValueOrigin("preset", str(name))
    draft.set_placement(row, origin)
    if "disk" in (row.weights.tier, row.optim.tier):
        draft.set("offload.nvme_path", disk_folder(), origin)


def _flatten(section: type[Section], data: dict[str, Any], draft: ConfigDraft, prefix: str = "") -> None:
    for key, value in data.items():
        path, field = prefix + key, section.model_fields.get(key)
        if field is None:
            known = section.model_fields if prefix else KEYS
            raise draft.error(path, value, f"unknown key{nearest(key, known)}")
        inner = subsection(field)
        if inner is None and value == "auto" and path not in _OWN_AUTO:
            draft.origins[path] = ValueOrigin("auto", path)
        elif inner is None:
            draft.set_from(path, path, value)
        elif value is not None:
            _flatten(inner, draft.section(path, _as_mapping(value)), draft, f"{path}.")


def _as_mapping(value: object) -> object:
    return value.model_dump(exclude_unset=True) if isinstance(value, Section) else value
