"""The text of `Config.explain()`: every effective value, its origin, and what it costs or saves, in 100 columns."""

import textwrap
from collections.abc import Iterable, Iterator
from itertools import zip_longest

from shardwise.config import costs
from shardwise.config.draft import KeyNote, Provenance, leaves
from shardwise.config.presets import PRESETS, preset_name
from shardwise.config.sections import ConfigSections, Precision, Section, Tier
from shardwise.sizes import format_bytes, format_count

WIDTH = 100
_VALUE_WIDTHS = (23, 19, 16)  # name, value, origin; the effect has the rest of the line
_NOTE_WIDTHS = (44, 14, 0)
_EXAMPLE = (8 * 10**9, 8)  # parameters and ranks of the example
_TIERS: tuple[Tier, ...] = ("device", "host", "disk")


def explain(config: ConfigSections, provenance: Provenance) -> str:
    """See `Config.explain`."""
    blocks = [_heading(config, provenance.source), _costs(config), _placement(config, provenance)]
    blocks += [_section(config, name, provenance) for name in ConfigSections.model_fields if name != "placement"]
    blocks += [_notes(provenance.notes)] if provenance.notes else []
    return "\n\n".join("\n".join(block) for block in blocks)


def _heading(config: ConfigSections, source: str) -> list[str]:
    name = preset_name(config.placement)
    if source != f"preset {name}":
        source += f": the placements of {name}" if name else ": placements of its own"
    return [*textwrap.wrap(f"shardwise configuration, {source}", WIDTH), "─" * WIDTH]


def _costs(config: ConfigSections) -> list[str]:
    """Bytes at rest by tier, also under zero0 and in bf16, and elements on the wire: formulas, and an example."""
    parts = costs.resting(config)
    parameters, ranks = _EXAMPLE

    def row(name: str, kinds: list[costs.RestingKind], remark: str = "", tier: Tier | None = None) -> str:
        size = format_bytes(costs.resting_bytes(kinds, parameters, ranks, tier))
        return f"  {name:<10}{costs.formula(kinds, tier):<18}{remark:<42}{size:>10}"

    def resting_with(**sections: Section) -> list[costs.RestingKind]:
        return costs.resting(config.model_copy(update=sections))

    lines = [f"{'At rest, in bytes per rank':<52}{f'{format_count(parameters)} parameters on {ranks} ranks':>30}"]
    tiers = [tier for tier in _TIERS if any(part.tier == tier for part in parts)]
    for tier in tiers:
        on_tier = ", ".join(f"{part.kind} {part.bytes_each}" for part in parts if part.tier == tier)
        lines.append(row(tier, parts, f"({on_tier})", tier))
    if len(tiers) > 1:
        lines.append(row("in all", parts))
    if config.placement != PRESETS["zero0"]:
        lines.append(row("zero0", resting_with(placement=PRESETS["zero0"]), "on the device of every rank"))
    if config.precision.compute == "fp32":
        lines.append(row("in bf16", resting_with(precision=Precision(compute="bf16")), "with precision.compute: bf16"))
    wire = costs.wire_formula(config.placement)
    if (outside := costs.wire_formula(config.placement, "outer")) != wire:
        wire = f"{wire} in a node, {outside} out of it"
    optimizer = config.optimizer.name if config.optimizer else "an optimizer with two fp32 moments (Adam)"
    lines.append(f"On the wire, in elements per rank and step: {wire}, where f = (W-1)/W")
    return [*lines, f"Ψ parameters, W ranks, K micro-batches per step; {optimizer}"]


def _placement(config: ConfigSections, provenance: Provenance) -> list[str]:
    lines = ["placement"]
    effects = {
        "weights": {
            "replicated": "whole on every rank",
            "node": "gathered from the ranks of a node, then released",
            "sharded": "gathered unit by unit, then released",
        },
        "grads": {
            "replicated": "added up locally, reduced once a step",
            "node": "reduced every micro-batch in the node, across nodes once a step",
            "sharded": "reduced every micro-batch to a shard",
        },
        "optim": {
            "replicated": "every rank updates everything",
            "node": "each rank of a node updates its shard of it",
            "sharded": "each rank updates its shard",
        },
    }
    for kind, own in config.placement:
        origins = dict.fromkeys(str(provenance.origin(f"placement.{kind}.{part}")) for part in ("sharding", "tier"))
        lines += _row(kind, str(own), ", ".join(origins), effects[kind][own.sharding])
    return lines


def _section(config: ConfigSections, name: str, provenance: Provenance) -> list[str]:
    section, description = getattr(config, name), ConfigSections.model_fields[name].description or ""
    if section is None:
        return [name, *_row("none", "", "default", description)]
    effects, unused = _effects(config), dict(_unused_groups(config, name, provenance))
    lines = [name]
    for path, value, field in leaves(section):
        full = f"{name}.{path}"
        if not any(group == "all settings" or path.startswith(f"{group}.") for group in unused):
            effect = effects.get(full, field.description or "")
            lines += _row(path, _value(path, value), str(provenance.origin(full)), effect)
    return lines + [line for group, reason in unused.items() for line in _row(group, "not in use", "", reason)]


def _unused_groups(config: ConfigSections, section: str, provenance: Provenance) -> Iterator[tuple[str, str]]:
    """Groups of settings of a section that have no effect under this configuration, with the reason."""
    tiers = {own.tier for _, own in config.placement}
    if section == "precision" and config.precision.compute not in ("fp16", "model"):
        yield "loss_scale", "only fp16 needs a loss scale"
    if section == "offload" and tiers == {"device"} and not provenance.has_any("offload"):
        yield "all settings", "everything rests on the device"
    elif section == "offload" and "disk" not in tiers and not provenance.has_any("offload.aio"):
        yield "aio", "nothing rests on disk"


def _value(path: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and path.endswith(("_bytes", "_memory")):
        return format_bytes(value)
    if isinstance(value, dict):
        return ", ".join(f"{key}={inner}" for key, inner in value.items()) or "none"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _effects(config: ConfigSections) -> dict[str, str]:
    """Effects that depend on other values, by path. The effect of any other value is its field's description."""
    precision, batch, depth = config.precision, config.batch, config.runtime.prefetch
    is_fp32 = precision.weights_dtype == "fp32"
    prefetch = f"hides gathers; costs {depth} unit{'s' * (depth > 1)} at the peak"
    if config.placement.weights.sharding == "replicated":
        prefetch = "no effect: weights are replicated"
    elif depth == 0:
        prefetch = "one unit less at the peak; gathers do not overlap"
    effects = {
        "precision.compute": f"{'fp32 weights are their own' if is_fp32 else '16-bit weights and an fp32'} master copy",
        "precision.accumulate_dtype": f"in effect: {costs.gradient_bytes(config)} bytes per gradient",
        "precision.loss_scale.dynamic": "stays at `initial`",
        "gradients.order": f"in effect: {config.order}, as grads are placed",
        "runtime.prefetch": prefetch,
    }
    if precision.compute == "model":
        effects["precision.compute"] = "the dtype of the model's parameters; the figures above are for 16 bits"
    if precision.loss_scale.dynamic:
        effects["precision.loss_scale.dynamic"] = "grows, and shrinks after overflows"
    if config.gradients.order is not None:
        effects["gradients.order"] = "decides how grads are placed"
    if batch.global_batch_size and batch.micro_batch_size and "accumulation" not in batch.model_fields_set:
        effects["batch.accumulation"] = f"derived at W ranks: {batch.global_batch_size} / ({batch.micro_batch_size} W)"
    return effects


def _notes(notes: Iterable[KeyNote]) -> list[str]:
    """The keys of a DeepSpeed or Accelerate file, by section."""
    sections: dict[str, list[str]] = {}
    for note in notes:
        section, _, key = note.key.rpartition(".")
        value = "{...}" if note.value.startswith("{") and len(note.value) > 12 else note.value.strip("'")
        sections.setdefault(section or "top level", []).extend(_row(key, value, "", note.effect, _NOTE_WIDTHS))
    names = sorted(sections, key=lambda name: (name != "top level", name))
    listed = (line for name in names for line in (f"[{name}]", *sections[name]))
    return ["The file's own keys, and what each does here", *listed]


def _row(name: str, value: str, origin: str, effect: str, widths: tuple[int, int, int] = _VALUE_WIDTHS) -> list[str]:
    """One value in columns; a cell that is too wide wraps inside its own column."""
    columns = [
        textwrap.wrap(name, widths[0] - 1, initial_indent="  ", subsequent_indent="  "),
        textwrap.wrap(value, widths[1] - 1),
        textwrap.wrap(origin, widths[2] - 1) if origin else [],
        textwrap.wrap(effect, WIDTH - sum(widths)),
    ]
    line = "".join(f"{{:<{width}}}" for width in widths) + "{}"
    return [line.format(*cells).rstrip() for cells in zip_longest(*columns, fillvalue="")]
