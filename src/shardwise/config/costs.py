"""What a placement costs: resting bytes per rank, and elements on the wire per step.

Derived from placements and dtypes, never from the number of a stage. Ψ is the number of parameters, W the number
of ranks, K the micro-batches per step.

    16-bit, Adam, K = 1     weights  grads  master  moments
    zero1                    2Ψ   +   2Ψ  + (4Ψ   +   8Ψ)/W   =  4Ψ + 12Ψ/W
"""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from shardwise.config.sections import ConfigSections, Sharding, Tier

_SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}
_MOMENTS = {"SGD": 0, "Lion": 4, "Adagrad": 4, "Muon": 4, "RMSprop": 4}  # bytes per parameter; all others as Adam
_ADAM_MOMENTS = 8


class Resting(NamedTuple):
    """Bytes per parameter that one kind of state takes at rest."""

    kind: str
    bytes_each: int
    sharding: Sharding
    tier: Tier


def resting(config: ConfigSections) -> list[Resting]:
    """What rests, kind by kind; kinds that take nothing are left out."""
    return [part for part in _parts(config) if part.bytes_each]


def _parts(config: ConfigSections) -> Iterator[Resting]:
    placement = config.placement
    yield Resting("weights", _weight_bytes(config), placement.weights.sharding, placement.weights.tier)
    yield Resting("grads", gradient_bytes(config), placement.grads.sharding, placement.grads.tier)
    # In fp32 the weights are their own master copy.
    master = 0 if config.precision.weights_dtype == "fp32" else 4
    yield Resting("master", master, placement.optim.sharding, placement.optim.tier)
    yield Resting("moments", moment_bytes(config), placement.optim.sharding, placement.optim.tier)


def _weight_bytes(config: ConfigSections) -> int:
    """Sharded 16-bit weights are cast from the master at gather: a copy rests only on the device, where the master left
    it and they stay."""
    weights, optim = config.placement.weights, config.placement.optim
    size = _SIZES[config.precision.weights_dtype]
    stays = weights.tier == "device" != optim.tier
    return 0 if size == 2 and weights.sharding == "sharded" and not stays else size


def gradient_bytes(config: ConfigSections) -> int:
    """Bytes of one held gradient."""
    precision = config.precision
    held = precision.accumulate_dtype or ("fp32" if config.batch.accumulation > 1 else precision.weights_dtype)
    return _SIZES[held]


def moment_bytes(config: ConfigSections) -> int:
    """Bytes of the optimizer's moments per parameter; Adam's where no optimizer is named."""
    section = config.optimizer
    return _ADAM_MOMENTS if section is None else moments_of(section.name, section.params)


def moments_of(name: str, options: Mapping[str, Any]) -> int:
    """Bytes of the moments per parameter that an optimizer of that name makes.

    >>> moments_of("SGD", {"momentum": 0.9}), moments_of("AdamW", {})
    (4, 8)
    """
    if name == "SGD" and options.get("momentum"):
        return 4
    return _MOMENTS.get(name, _ADAM_MOMENTS) + 4 * bool(options.get("amsgrad"))


def formula(parts: list[Resting], tier: Tier | None = None) -> str:
    """Resting bytes per rank as a formula, of all tiers or of one: "4Ψ + 12Ψ/W"."""
    chosen = [part for part in parts if tier in (None, part.tier)]
    whole = sum(part.bytes_each for part in chosen if part.sharding == "replicated")
    cut = sum(part.bytes_each for part in chosen if part.sharding == "sharded")
    terms = [f"{whole}Ψ"] * bool(whole) + [f"{cut}Ψ/W"] * bool(cut)
    return " + ".join(terms) or "0"


def resting_bytes(parts: list[Resting], parameters: int, world_size: int, tier: Tier | None = None) -> float:
    """The same as a number."""
    chosen = [part for part in parts if tier in (None, part.tier)]
    cut = {"replicated": Fraction(1), "sharded": Fraction(1, world_size)}
    return float(sum(part.bytes_each * parameters * cut[part.sharding] for part in chosen))


def wire(config: ConfigSections) -> str:
    """Elements that a rank sends per step, as a formula with f = (W-1)/W."""
    local = config.order == "local"
    if config.placement.weights.sharding == "sharded":
        return "(2K + 1)Ψf" if local else "3KΨf"
    return "2Ψf" if local else "(K + 1)Ψf"
