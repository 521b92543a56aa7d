"""The cost model: bytes at rest per kind and tier, and elements sent per step. Integers and fractions only.

All costs follow from placements and dtypes, never from the number of a stage. Ψ is the number of parameters, W the
number of ranks, K the micro-batches per step. The engine, the plan, the comparison and `Config.explain()` all call
these functions.

    16-bit, Adam, K = 1     weights  grads  master  moments
    zero1                    2Ψ   +   2Ψ  + (4Ψ   +   8Ψ)/W   =  4Ψ + 12Ψ/W
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from shardwise.config.sections import ConfigSections, Placement, Sharding, Tier

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
MASTER_BYTES = DTYPE_BYTES["fp32"]
_MOMENT_BYTES = {"SGD": 0, "Lion": 4, "Adagrad": 4, "Muon": 4, "RMSprop": 4}  # per parameter; all others as Adam: 8


class RestingKind(NamedTuple):
    """Bytes per parameter that one kind takes at rest (optim as two: master and moments), and where."""

    kind: str
    bytes_each: int
    sharding: Sharding
    tier: Tier

    def rank_bytes(self, parameters: int, world_size: int) -> Fraction:
        """Bytes on one rank."""
        return self.bytes_each * parameters * rank_share(self.sharding, world_size)


def rank_share(sharding: Sharding, world_size: int) -> Fraction:
    """The part of a kind that one rank holds."""
    return Fraction(1, world_size) if sharding == "sharded" else Fraction(1)


def resting(config: ConfigSections) -> list[RestingKind]:
    """What rests of trainable parameters, kind by kind. Where no optimizer is named, the moments are Adam's."""
    section = config.optimizer
    moments = moments_of(section.name, section.params) if section else moments_of("Adam", {})
    return resting_kinds(config.placement, weight_bytes(config), gradient_bytes(config), moments)


def resting_kinds(placement: Placement, weights: int, grads: int, moments: int) -> list[RestingKind]:
    """What rests of trainable parameters with so many bytes each; kinds that take nothing are left out.

    fp32 weights are their own master copy. Sharded 16-bit weights are cast from the master at gather and do not rest,
    except on the device when the master is on another tier.
    """
    has_master = weights < MASTER_BYTES
    is_apart = placement.weights.tier == "device" != placement.optim.tier
    is_cast = has_master and placement.weights.sharding == "sharded" and not is_apart
    kinds = (
        ("weights", 0 if is_cast else weights, placement.weights),
        ("grads", grads, placement.grads),
        ("master", MASTER_BYTES if has_master else 0, placement.optim),
        ("moments", moments, placement.optim),
    )
    return [RestingKind(kind, each, own.sharding, own.tier) for kind, each, own in kinds if each]


def resting_frozen(placement: Placement, weights: int) -> list[RestingKind]:
    """What rests of frozen parameters: their weights, in their own dtype."""
    return [RestingKind("weights", weights, placement.weights.sharding, placement.weights.tier)]


def weight_bytes(config: ConfigSections) -> int:
    """Bytes of one weight that computes."""
    return DTYPE_BYTES[config.precision.weights_dtype]


def gradient_bytes(config: ConfigSections) -> int:
    """Bytes of one gradient between backward and update."""
    return DTYPE_BYTES[config.accumulate_dtype]


def moments_of(name: str, options: Mapping[str, Any]) -> int:
    """Bytes of the moments per parameter of the optimizer `name`.

    >>> moments_of("SGD", {"momentum": 0.9}), moments_of("AdamW", {})
    (4, 8)
    """
    if name == "SGD" and options.get("momentum"):
        return 4
    return _MOMENT_BYTES.get(name, 8) + 4 * bool(options.get("amsgrad"))


def formula(kinds: Iterable[RestingKind], tier: Tier | None = None) -> str:
    """Resting bytes per rank as a formula such as "4Ψ + 12Ψ/W", of all tiers or of one."""
    each = Counter({"Ψ": 0, "Ψ/W": 0})
    for kind in _on(tier, kinds):
        each["Ψ/W" if kind.sharding == "sharded" else "Ψ"] += kind.bytes_each
    return " + ".join(f"{size}{unit}" for unit, size in each.items() if size) or "0"


def resting_bytes(kinds: Iterable[RestingKind], parameters: int, world_size: int, tier: Tier | None = None) -> float:
    """Resting bytes per rank as a number, of all tiers or of one."""
    return float(sum(kind.rank_bytes(parameters, world_size) for kind in _on(tier, kinds)))


def offloaded_bytes_each(kinds: Iterable[RestingKind]) -> int:
    """Bytes per parameter that rest off the device."""
    return sum(kind.bytes_each for kind in kinds if kind.tier != "device")


def _on(tier: Tier | None, kinds: Iterable[RestingKind]) -> list[RestingKind]:
    return [kind for kind in kinds if tier in (None, kind.tier)]


class WireTimes(NamedTuple):
    """How many times one step sends each element, by what is sent: contract C3."""

    gathers: int  # weights, before forward and backward; frozen weights are sent for these alone
    reductions: int  # gradients
    updates: int  # updated weights that are replicated; under a replicated optimizer, the reduced gradients instead


def wire_times(placement: Placement, accumulation: int) -> WireTimes:
    """How many times a step of `accumulation` micro-batches sends each element, at most.

    >>> wire_times(Placement(), accumulation=4)
    WireTimes(gathers=0, reductions=1, updates=1)
    """
    has_sharded_weights = placement.weights.sharding == "sharded"
    return WireTimes(
        gathers=2 * accumulation if has_sharded_weights else 0,
        reductions=accumulation if placement.grads.sharding == "sharded" else 1,
        updates=0 if has_sharded_weights else 1,
    )


def sent(size: int, world_size: int) -> int:
    """What one rank sends of `size` elements or bytes of a collective over all ranks: (W-1)/W of them."""
    return size * (world_size - 1) // world_size


def wire_formula(placement: Placement) -> str:
    """Elements that a rank sends per step, as a formula with f = (W-1)/W, such as "(K + 1)Ψf"."""
    constant = sum(wire_times(placement, 0))
    slope = sum(wire_times(placement, 1)) - constant
    times_k = "K" if slope == 1 else f"{slope}K"
    if not slope:
        return f"{constant}Ψf"
    return f"({times_k} + {constant})Ψf" if constant else f"{times_k}Ψf"
