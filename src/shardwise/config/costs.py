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

from shardwise.config.sections import ConfigSections, Placement, Tier
from shardwise.config.shape import AXES, Axis, NodeShape, Sharding, shape_of

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
MASTER_BYTES = DTYPE_BYTES["fp32"]
_MOMENT_BYTES = {"SGD": 0, "Lion": 4, "Adagrad": 4, "Muon": 4, "RMSprop": 4}  # per parameter; all others as Adam: 8


class RestingKind(NamedTuple):
    """Bytes per parameter that one kind takes at rest (optim as two: master and moments), and where."""

    kind: str
    bytes_each: int
    sharding: Sharding
    tier: Tier

    def rank_bytes(self, parameters: int, ranks: int | NodeShape) -> Fraction:
        """Bytes on one rank."""
        return self.bytes_each * parameters * rank_share(self.sharding, ranks)


def rank_share(sharding: Sharding, ranks: int | NodeShape) -> Fraction:
    """The part of a kind that one rank holds."""
    return Fraction(1, shape_of(ranks).parts(sharding))


def resting(config: ConfigSections) -> list[RestingKind]:
    """What rests of trainable parameters, kind by kind."""
    return resting_kinds(config.placement, weight_bytes(config), gradient_bytes(config), moment_bytes(config))


def resting_kinds(placement: Placement, weights: int, grads: int, moments: int) -> list[RestingKind]:
    """What rests of trainable parameters with so many bytes each; kinds that take nothing are left out.

    fp32 weights are their own master copy. 16-bit weights that are cut as the master is are cast from it at gather and
    do not rest, except on the device when the master is on another tier.
    """
    has_master = weights < MASTER_BYTES
    is_apart = placement.weights.tier == "device" != placement.optim.tier
    cut = placement.weights.sharding
    is_cast = has_master and cut != "replicated" and cut == placement.optim.sharding and not is_apart
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


def moment_bytes(config: ConfigSections) -> int:
    """Bytes of the optimizer's moments per parameter; Adam's where no optimizer is named."""
    section = config.optimizer
    return moments_of(section.name, section.params) if section else moments_of("Adam", {})


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
    share: dict[Sharding, str] = {"replicated": "Ψ", "node": "Ψ/n", "sharded": "Ψ/W"}
    each = Counter(dict.fromkeys(share.values(), 0))
    for kind in _on(tier, kinds):
        each[share[kind.sharding]] += kind.bytes_each
    return " + ".join(f"{size}{unit}" for unit, size in each.items() if size) or "0"


def resting_bytes(
    kinds: Iterable[RestingKind], parameters: int, ranks: int | NodeShape, tier: Tier | None = None
) -> float:
    """Resting bytes per rank as a number, of all tiers or of one."""
    return float(sum(kind.rank_bytes(parameters, ranks) for kind in _on(tier, kinds)))


def offloaded_bytes_each(kinds: Iterable[RestingKind]) -> int:
    """Bytes per parameter that rest off the device."""
    return sum(kind.bytes_each for kind in kinds if kind.tier != "device")


def _on(tier: Tier | None, kinds: Iterable[RestingKind]) -> list[RestingKind]:
    return [kind for kind in kinds if tier in (None, kind.tier)]


class WireTimes(NamedTuple):
    """How many times one step sends each element over an axis, by what is sent: contract C3."""

    gathers: int  # weights, before forward and backward; frozen weights are sent for these alone
    reductions: int  # gradients
    updates: int  # updated weights that are replicated; under a replicated optimizer, the reduced gradients instead


def wire_times(placement: Placement, accumulation: int, axis: Axis = "inner") -> WireTimes:
    """How many times a step of `accumulation` micro-batches sends each element over an axis, at most.

    >>> wire_times(Placement(), accumulation=4)
    WireTimes(gathers=0, reductions=1, updates=1)
    """
    cuts_weights, cuts_grads = axis in AXES[placement.weights.sharding], axis in AXES[placement.grads.sharding]
    return WireTimes(
        gathers=2 * accumulation if cuts_weights else 0,
        reductions=accumulation if cuts_grads else 1,
        updates=0 if cuts_weights else 1,
    )


def sent(size: int, ranks: int | NodeShape, axis: Axis = "inner") -> int:
    """What one rank sends over an axis of `size` elements or bytes that travel over all ranks. In one node it is
    (W-1)/W of them; on several, (n-1)/n go over the node, and of the rest (N-1)/N across nodes.

    >>> sent(1600, 16), [sent(1600, NodeShape(nodes=2, per_node=8), axis) for axis in ("inner", "outer")]
    (1500, [1400, 100])
    """
    shape = shape_of(ranks)
    part = size if axis == "inner" else size // shape.per_node
    return part * (shape.size(axis) - 1) // shape.size(axis)


def wire_formula(placement: Placement, axis: Axis = "inner") -> str:
    """Elements that a rank sends per step, as a formula with f = (W-1)/W, such as "(K + 1)Ψf". Over one axis, f is the
    part of it that leaves a rank, or a node."""
    constant = sum(wire_times(placement, 0, axis))
    slope = sum(wire_times(placement, 1, axis)) - constant
    times_k = "K" if slope == 1 else f"{slope}K"
    if not slope:
        return f"{constant}Ψf"
    return f"({times_k} + {constant})Ψf" if constant else f"{times_k}Ψf"
