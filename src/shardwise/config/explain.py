"""`Config.explain()`: every effective value, where it came from, and what it costs or saves, in 100 columns."""

import textwrap
from collections.abc import Callable, Iterator

from shardwise.config import costs
from shardwise.config.config import Config
from shardwise.config.paths import leaves, section_class, subsection
from shardwise.config.presets import PRESETS, preset_name
from shardwise.config.sections import Section, Tier
from shardwise.sizes import format_bytes, format_count

WIDTH = 100
_NAME, _VALUE, _FROM = 25, 18, 22
_EXAMPLE = (8 * 10**9, 8)  # parameters and ranks of the example
_TIER_NAMES: dict[Tier, str] = {"device": "device", "host": "host", "disk": "disk"}


def explain(config: Config) -> str:
    """See `Config.explain`."""
    blocks = [_heading(config), _costs(config), _placement(config)]
    blocks += [_section(config, name) for name in Config.model_fields if name != "placement"]
    blocks += [_notes(config)] if config._notes else []
    return "\n\n".join("\n".join(block) for block in blocks)


def _heading(config: Config) -> list[str]:
    name = preset_name(config.placement)
    row = f"the placements of {name}" if name else "placements of its own"
    source = config._source if config._source != f"preset {name}" else f"preset {name}"
    title = source if source == f"preset {name}" else f"{source}: {row}"
    return [*textwrap.wrap(f"shardwise configuration, {title}", WIDTH), "─" * WIDTH]


def _costs(config: Config) -> list[str]:
    """The bill: bytes at rest by tier and bytes on the wire, with an example in numbers."""
    parts = costs.resting(config)
    parameters, ranks = _EXAMPLE
    tiers = [tier for tier in _TIER_NAMES if any(part.tier == tier for part in parts)]
    lines = [
        f"At rest, in bytes per rank                          "
        f"{f'{format_count(parameters)} parameters on {ranks} ranks':>30}"
    ]
    for tier in tiers:
        held = ", ".join(f"{part.kind} {part.bytes_each}" for part in parts if part.tier == tier)
        size = format_bytes(costs.resting_bytes(parts, parameters, ranks, tier))
        lines.append(f"  {tier:<10}{costs.formula(parts, tier):<18}{'(' + held + ')':<42}{size:>10}")
    if len(tiers) > 1:
        total = format_bytes(costs.resting_bytes(parts, parameters, ranks))
        lines.append(f"  {'in all':<10}{costs.formula(parts):<60}{total:>10}")
    lines += _saving(config, parts)
    lines.append(f"On the wire, in elements per rank and step: {costs.wire(config)}, where f = (W-1)/W")
    lines.append("Ψ parameters, W ranks, K micro-batches per step" + _assumed_optimizer(config))
    return lines


def _saving(config: Config, parts: list[costs.Resting]) -> list[str]:
    parameters, ranks = _EXAMPLE
    plain = costs.resting(config.model_copy(update={"placement": PRESETS["zero0"]}))
    before = costs.resting_bytes(plain, parameters, ranks)
    after = costs.resting_bytes(parts, parameters, ranks, "device")
    if after >= before:
        return [f"  All of it on every rank; zero1, zero2 and zero3 cut this {format_bytes(before)} up over the ranks"]
    return [f"  A copy on every rank (zero0) would rest {costs.formula(plain)} = {format_bytes(before)} on the device"]


def _assumed_optimizer(config: Config) -> str:
    return "; an optimizer with two fp32 moments (Adam)" if config.optimizer is None else f"; {config.optimizer.name}"


def _placement(config: Config) -> list[str]:
    lines = ["placement"]
    effects = {
        "weights": {"replicated": "whole on every rank", "sharded": "gathered unit by unit, released after use"},
        "grads": {
            "replicated": "added up locally, reduced once a step (order local)",
            "sharded": "reduced every micro-batch, only shards are held (order sharded)",
        },
        "optim": {"replicated": "every rank updates everything", "sharded": "each rank updates its shard"},
    }
    for kind, effect in effects.items():
        own = getattr(config.placement, kind)
        origins = dict.fromkeys(str(config.origin(f"placement.{kind}.{part}")) for part in ("sharding", "tier"))
        lines += _row(f"  {kind}", str(own), ", ".join(origins), effect[own.sharding])
    return lines


def _section(config: Config, name: str) -> list[str]:
    field = Config.model_fields[name]
    value = getattr(config, name)
    if value is None:
        return [f"{name}", *_row("  (none)", "", "default", field.description or "")]
    kind = subsection(field)
    assert kind is not None
    lines = [name]
    for path in leaves(kind):
        full = f"{name}.{path}"
        lines += _row(f"  {path}", _value(config, full), str(config.origin(full)), _effect(config, full))
    return lines


def _value(config: Config, path: str) -> str:
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


def _at(config: Config, path: str) -> object:
    value: object = config
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _effect(config: Config, path: str) -> str:
    effect = _EFFECTS.get(path)
    if effect is not None:
        return effect(config)
    *parents, leaf = path.split(".")
    section = section_class(type(config), parents)
    return (section.model_fields[leaf].description or "") if section else ""


def _compute(config: Config) -> str:
    precision = config.precision
    if precision.weights_dtype == "fp32":
        return f"forward and backward in {precision.compute}; fp32 weights are their own master copy"
    return "2 bytes a weight that computes; the optimizer keeps an fp32 master copy"


def _accumulate(config: Config) -> str:
    each = costs.gradient_bytes(config)
    return f"gradients are held in {each} bytes each" + (" (fp32 sums of K micro-batches)" if each == 4 else "")


def _prefetch(config: Config) -> str:
    if config.placement.weights.sharding == "replicated":
        return "no effect: weights are replicated"
    depth = config.runtime.prefetch
    return (
        f"hides gathers; costs {depth} unit{'s' * (depth != 1)} of weights at the peak"
        if depth
        else "nothing hides gathers"
    )


def _batch(config: Config) -> str:
    batch = config.batch
    if batch.global_batch_size and batch.micro_batch_size and "accumulation" not in batch.model_fields_set:
        return f"derived at W ranks: {batch.global_batch_size} / ({batch.micro_batch_size} W)"
    return "micro-batches per step (K)"


def _order(config: Config) -> str:
    return (
        f"in effect: {config.order}, from where grads rest"
        if config.gradients.order is None
        else "sets where grads rest"
    )


def _loss_scale(config: Config) -> str:
    if config.precision.compute != "fp16":
        return "no effect: only fp16 needs a loss scale"
    return "grows and shrinks with overflows" if config.precision.loss_scale.dynamic else "stays at `initial`"


_EFFECTS: dict[str, Callable[[Config], str]] = {
    "precision.compute": _compute,
    "precision.accumulate_dtype": _accumulate,
    "precision.loss_scale.dynamic": _loss_scale,
    "gradients.order": _order,
    "batch.accumulation": _batch,
    "runtime.prefetch": _prefetch,
}


def _notes(config: Config) -> list[str]:
    lines = ["the file's own keys, and what each does here"]
    for note in config._notes:
        lines += _row(f"  {note.key}", note.value, "", note.effect, widths=(46, 16, 0))
    return lines


def _row(
    name: str, value: str, origin: str, effect: str, widths: tuple[int, int, int] = (_NAME, _VALUE, _FROM)
) -> list[str]:
    """One value in columns; a cell that is too wide wraps inside its own column."""
    columns = [_wrap(text, width - 1) for text, width in zip((name, value, origin), widths, strict=True) if width]
    widths_left = [width for width in widths if width]
    columns.append(_wrap(effect, WIDTH - sum(widths)))
    widths_left.append(WIDTH - sum(widths))
    return [line.rstrip() for line in _zip_lines(columns, widths_left)]


def _wrap(text: str, width: int) -> list[str]:
    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent + "  " if indent else "") or [""]


def _zip_lines(columns: list[list[str]], widths: list[int]) -> Iterator[str]:
    for i in range(max(map(len, columns))):
        cells = (column[i] if i < len(column) else "" for column in columns)
        yield "".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))


__all__ = ["Section", "explain"]
