"""The text of `Config.explain()`: every effective value, its origin, and what it costs or saves, in 100 columns."""

import textwrap
from collections.abc import Callable, Iterable, Iterator

from shardwise.config import costs
from shardwise.config.draft import KeyNote, Provenance, leaves, section_class, subsection
from shardwise.config.presets import PRESETS, preset_name
from shardwise.config.sections import ConfigSections, Precision, Tier
from shardwise.sizes import format_bytes, format_count

WIDTH = 100
_NAME, _VALUE, _FROM = 23, 19, 16
_EXAMPLE = (8 * 10**9, 8)  # parameters and ranks of the example
_TIERS: tuple[Tier, ...] = ("device", "host", "disk")


def explain(config: ConfigSections, provenance: Provenance) -> str:
    """See `Config.explain`."""
    blocks = [_heading(config, provenance.source), _costs(config), _placement(config, provenance)]
    names = [name for name in ConfigSections.model_fields if name != "placement"]
    blocks += [_section(config, name, provenance) for name in names]
    blocks += [_notes(provenance.notes)] if provenance.notes else []
    return "\n\n".join("\n".join(block) for block in blocks)


def _heading(config: ConfigSections, source: str) -> list[str]:
    name = preset_name(config.placement)
    if source != f"preset {name}":
        source += f": the placements of {name}" if name else ": placements of its own"
    return [*textwrap.wrap(f"shardwise configuration, {source}", WIDTH), "─" * WIDTH]


def _costs(config: ConfigSections) -> list[str]:
    """Bytes at rest by tier and elements on the wire, as formulas and with an example in numbers."""
    parts = costs.resting(config)
    parameters, ranks = _EXAMPLE
    tiers = [tier for tier in _TIERS if any(part.tier == tier for part in parts)]
    lines = [f"{'At rest, in bytes per rank':<52}{f'{format_count(parameters)} parameters on {ranks} ranks':>30}"]
    for tier in tiers:
        held = ", ".join(f"{part.kind} {part.bytes_each}" for part in parts if part.tier == tier)
        size = format_bytes(costs.resting_bytes(parts, parameters, ranks, tier))
        lines.append(f"  {tier:<10}{costs.formula(parts, tier):<18}{'(' + held + ')':<42}{size:>10}")
    if len(tiers) > 1:
        total = format_bytes(costs.resting_bytes(parts, parameters, ranks))
        lines.append(f"  {'in all':<10}{costs.formula(parts):<60}{total:>10}")
    lines += _saving(config)
    wire = costs.wire_formula(config.placement)
    lines.append(f"On the wire, in elements per rank and step: {wire}, where f = (W-1)/W")
    lines.append("Ψ parameters, W ranks, K micro-batches per step" + _assumed_optimizer(config))
    return lines


def _saving(config: ConfigSections) -> list[str]:
    """What the same model takes under zero0 and in bf16, for comparison."""
    parameters, ranks = _EXAMPLE
    plain = costs.resting(config.model_copy(update={"placement": PRESETS["zero0"]}))
    lines = []
    if config.placement != PRESETS["zero0"]:
        size = format_bytes(costs.resting_bytes(plain, parameters, ranks))
        lines.append(f"  {'zero0':<10}{costs.formula(plain):<18}{'on the device of every rank':<42}{size:>10}")
    if config.precision.compute == "fp32":
        half = costs.resting(config.model_copy(update={"precision": Precision(compute="bf16")}))
        size = format_bytes(costs.resting_bytes(half, parameters, ranks))
        lines.append(f"  {'in bf16':<10}{costs.formula(half):<18}{'with precision.compute: bf16':<42}{size:>10}")
    return lines


def _assumed_optimizer(config: ConfigSections) -> str:
    return "; an optimizer with two fp32 moments (Adam)" if config.optimizer is None else f"; {config.optimizer.name}"


def _placement(config: ConfigSections, provenance: Provenance) -> list[str]:
    lines = ["placement"]
    effects = {
        "weights": {"replicated": "whole on every rank", "sharded": "gathered unit by unit, then released"},
        "grads": {
            "replicated": "added up locally, reduced once a step",
            "sharded": "reduced every micro-batch to a shard",
        },
        "optim": {"replicated": "every rank updates everything", "sharded": "each rank updates its shard"},
    }
    for kind, effect in effects.items():
        own = getattr(config.placement, kind)
        origins = dict.fromkeys(str(provenance.origin(f"placement.{kind}.{part}")) for part in ("sharding", "tier"))
        lines += _row(kind, str(own), ", ".join(origins), effect[own.sharding])
    return lines


def _section(config: ConfigSections, name: str, provenance: Provenance) -> list[str]:
    field = ConfigSections.model_fields[name]
    if getattr(config, name) is None:
        return [name, *_row("none", "", "default", field.description or "")]
    kind = subsection(field)
    assert kind is not None
    lines, unused = [name], dict(_unused_groups(config, name, provenance))
    for path in leaves(kind):
        full = f"{name}.{path}"
        if not any(group == "all settings" or path.startswith(f"{group}.") for group in unused):
            lines += _row(path, _value(config, full), str(provenance.origin(full)), _effect(config, full))
    return lines + [line for group, reason in unused.items() for line in _row(group, "not in use", "", reason)]


def _unused_groups(config: ConfigSections, section: str, provenance: Provenance) -> Iterator[tuple[str, str]]:
    """Groups of settings of a section that have no effect under this configuration, with the reason."""
    tiers = {config.placement.weights.tier, config.placement.grads.tier, config.placement.optim.tier}
    if section == "precision" and config.precision.compute != "fp16":
        yield "loss_scale", "only fp16 needs a loss scale"
    if section == "offload" and tiers == {"device"} and not provenance.has_any("offload"):
        yield "all settings", "everything rests on the device"
    elif section == "offload" and "disk" not in tiers and not provenance.has_any("offload.aio"):
        yield "aio", "nothing rests on disk"


def _value(config: ConfigSections, path: str) -> str:
    value = _at(config, path)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and (path.endswith(("_bytes", "_memory"))):
        return format_bytes(value)
    if isinstance(value, dict):
        return ", ".join(f"{key}={inner}" for key, inner in value.items()) or "none"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _at(config: ConfigSections, path: str) -> object:
    value: object = config
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _effect(config: ConfigSections, path: str) -> str:
    effect = _EFFECTS.get(path)
    if effect is not None:
        return effect(config)
    *parents, leaf = path.split(".")
    section = section_class(type(config), parents)
    return (section.model_fields[leaf].description or "") if section else ""


def _compute(config: ConfigSections) -> str:
    precision = config.precision
    if precision.weights_dtype == "fp32":
        return "fp32 weights are their own master copy"
    return "16-bit weights and an fp32 master copy"


def _accumulate(config: ConfigSections) -> str:
    each = costs.gradient_bytes(config)
    return f"in effect: {each} bytes per gradient"


def _prefetch(config: ConfigSections) -> str:
    if config.placement.weights.sharding == "replicated":
        return "no effect: weights are replicated"
    depth = config.runtime.prefetch
    if depth == 0:
        return "one unit less at the peak; gathers do not overlap"
    return f"hides gathers; costs {depth} unit{'s' * (depth > 1)} at the peak"


def _batch(config: ConfigSections) -> str:
    batch = config.batch
    if batch.global_batch_size and batch.micro_batch_size and "accumulation" not in batch.model_fields_set:
        return f"derived at W ranks: {batch.global_batch_size} / ({batch.micro_batch_size} W)"
    return "micro-batches per step (K)"


def _order(config: ConfigSections) -> str:
    given = config.gradients.order is not None
    return "decides how grads are placed" if given else f"in effect: {config.order}, as grads are placed"


def _loss_scale(config: ConfigSections) -> str:
    return "grows, and shrinks after overflows" if config.precision.loss_scale.dynamic else "stays at `initial`"


_EFFECTS: dict[str, Callable[[ConfigSections], str]] = {
    "precision.compute": _compute,
    "precision.accumulate_dtype": _accumulate,
    "precision.loss_scale.dynamic": _loss_scale,
    "gradients.order": _order,
    "batch.accumulation": _batch,
    "runtime.prefetch": _prefetch,
}


def _notes(notes: Iterable[KeyNote]) -> list[str]:
    """The keys of a DeepSpeed or Accelerate file, by section."""
    sections: dict[str, list[str]] = {}
    for note in notes:
        section, _, key = note.key.rpartition(".")
        lines = sections.setdefault(section or "top level", [])
        lines += _row(key, _short(note.value), "", note.effect, widths=(44, 14, 0))
    listed = (line for name in sorted(sections, key=_top_level_first) for line in (f"[{name}]", *sections[name]))
    return ["The file's own keys, and what each does here", *listed]


def _short(value: str) -> str:
    return "{...}" if value.startswith("{") and len(value) > 12 else value.strip("'")


def _top_level_first(section: str) -> tuple[bool, str]:
    return section != "top level", section


def _row(
    name: str, value: str, origin: str, effect: str, widths: tuple[int, int, int] = (_NAME, _VALUE, _FROM)
) -> list[str]:
    """One value in columns; a cell that is too wide wraps inside its own column."""
    cells = [(f"  {name}", widths[0]), (value, widths[1]), (origin, widths[2]), (effect, WIDTH - sum(widths))]
    used = [(text, width) for text, width in cells if width]
    columns = [_wrap(text, width if text is effect else width - 1) for text, width in used]
    return [line.rstrip() for line in _zip_lines(columns, [width for _, width in used])]


def _wrap(text: str, width: int) -> list[str]:
    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.wrap(text.strip(), width, initial_indent=indent, subsequent_indent=indent) or [""]


def _zip_lines(columns: list[list[str]], widths: list[int]) -> Iterator[str]:
    for i in range(max(map(len, columns))):
        cells = (column[i] if i < len(column) else "" for column in columns)
        yield "".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))
