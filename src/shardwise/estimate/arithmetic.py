"""The arithmetic of a plan: bytes of model states per rank, elements on the wire, operations of a step.

Ψ parameters, W ranks, K micro-batches per step. An accounting says how many bytes each kind takes per parameter; these
are the textbook's states. The engine holds less under zero3: the 16-bit weights are cast from the fp32 master when
they are gathered, so that 14Ψ/W rest instead of 16Ψ/W.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

import torch

from shardwise.config import Config, costs
from shardwise.config.presets import PRESETS
from shardwise.config.shape import AXES, Axis, NodeShape, shape_of
from shardwise.errors import ConfigError
from shardwise.estimate.hardware import Hardware
from shardwise.models.workload import ModelSpec, Workload
from shardwise.partition.policy import policy_for


class Accounting(NamedTuple):
    """Bytes per parameter."""

    weights: int
    grads: int
    master: int
    moments: int

    @property
    def optim(self) -> int:
        return self.master + self.moments


ACCOUNTINGS = {
    "full": Accounting(2, 2, 4, 8),
    "no-master": Accounting(2, 2, 0, 8),
    "fp32": Accounting(4, 4, 0, 8),
}


def accounting(name: str) -> Accounting:
    """An accounting by name."""
    if name not in ACCOUNTINGS:
        raise ConfigError(f"unknown accounting {name!r}: choose from {', '.join(ACCOUNTINGS)}")
    return ACCOUNTINGS[name]


def state_bytes(preset: str, parameters: int, world_size: int, each: Accounting) -> dict[str, Fraction]:
    """Model states of a rank by kind, exactly.

    >>> {kind: float(size) / 1e9 for kind, size in state_bytes("zero1", 8 * 10**9, 5, ACCOUNTINGS["no-master"]).items()}
    {'weights': 16.0, 'grads': 16.0, 'optim': 12.8}
    """
    own = {kind: (getattr(each, kind), placed.sharding) for kind, placed in PRESETS[preset]}
    return {kind: parameters * size * costs.rank_share(cut, world_size) for kind, (size, cut) in own.items()}


def total_bytes(preset: str, parameters: int, world_size: int, each: Accounting) -> Fraction:
    """Model states of a rank."""
    return sum(state_bytes(preset, parameters, world_size, each).values(), Fraction(0))


def saving(preset: str, world_size: int, each: Accounting) -> Fraction:
    """How many times less a rank holds than under zero0."""
    return total_bytes("zero0", 1, world_size, each) / total_bytes(preset, 1, world_size, each)


class Moved(NamedTuple):
    """Bytes that a rank brings to its device in a step, and takes back."""

    up: int
    down: int


def operations(model: ModelSpec, workload: Workload) -> int:
    """Floating-point operations of a rank's step: 2 for each weight and token in the forward, twice that in the
    backward (once for frozen weights), and attention."""
    of = model.dimensions
    active = of.active_parameters if of else model.parameters
    passes = (3 if model.trainable > model.frozen else 2) + workload.checkpointing
    attention = of.layers * of.heads * of.head_dim * workload.sequence if of else 0
    return 2 * passes * (active + attention) * workload.tokens * workload.accumulation


def sent_by_axis(preset: str, model: ModelSpec, workload: Workload, ranks: int | NodeShape) -> dict[Axis, int]:
    """Bytes that a rank sends in a step within its node and out of it, at most, as the engine counts it: gradients that
    were added up in fp32 are sent in fp32."""
    config = workload.config(preset).for_shape(shape_of(ranks))
    policies = [policy_for(config, is_trained, torch.float32) for is_trained in (True, False)]
    sent: dict[Axis, int] = {}
    for axis in AXES["sharded"]:
        trained, frozen = (policy.wire_bytes_each(workload.accumulation, axis) for policy in policies)
        sent[axis] = costs.sent(trained * model.trainable + frozen * model.frozen, ranks, axis)
    return sent


def tp_bytes(model: ModelSpec, workload: Workload) -> int:
    """Bytes that a rank, which holds `model` of it, sends in a step to the others of its copy of the model, in rings.

    All-reductions of activations: of each layer in the forward after attention and MLP, in the backward for the inputs
    of q, k, v, up and gate; the embedding, and the input of the head. The logits are gathered. A recomputation ends
    before the last of a layer.
    """
    of, tp = model.dimensions, workload.tp
    if of is None or tp == 1:
        return 0
    each = of.layers * (6 + of.gated + workload.checkpointing) + 2
    item = costs.DTYPE_BYTES[workload.precision]
    numel = workload.tokens * (2 * each * of.hidden // tp + of.vocabulary)
    return workload.accumulation * item * numel * (tp - 1)


def moved_bytes(config: Config, trainable: int, frozen: int, world_size: int) -> Moved:
    """Between a rank's device and the tiers below it: `trainable` elements whose states rest there.

    States are copied to the device for the update, and back. Gradients are copied down as they are made; where several
    micro-batches are added up, the sum is copied up before each but the first. Weights that rest elsewhere are copied
    up for every gather, of which one is the update's.
    """
    count, placement = config.batch.accumulation, config.placement
    away = {part.kind: part.bytes_each for part in costs.resting(config) if part.tier != "device"}
    # fp32 weights that rest off the device are the master, which the update brings and takes back.
    states = sum(away.get(kind, 0) for kind in ("weights", "master", "moments"))
    grads = costs.gradient_bytes(config) if placement.grads.tier != "device" else 0
    up = down = states + grads * count
    weights, frozen_each = 0, 0
    if placement.weights.tier != "device":
        weights = costs.MASTER_BYTES * (2 * count - 1)
        frozen_each = 2 * count * costs.weight_bytes(config)
    return Moved(((up + weights) * trainable + frozen_each * frozen) // world_size, down * trainable // world_size)


def wire_s(sent: Mapping[Axis, int], on: Hardware) -> float:
    """Seconds to send it, within the node and through the link that the ranks of a node share."""
    rates = on.rates.or_typical()
    return max(sent["inner"] / rates["gpu_link"], sent["outer"] * on.shape.per_node / rates["node_link"])


def wire_share(preset: str, model: ModelSpec, workload: Workload, on: Hardware) -> float | None:
    """Time of sending over time of computing; None where the machine's rates were not given."""
    rates = on.rates
    link = rates.gpu_link if on.nodes == 1 else rates.gpu_link and rates.node_link
    if rates.operations is None or link is None:
        return None
    sent = sent_by_axis(preset, model, workload, on.zero_shape(workload.tp, workload.pp))
    return wire_s(sent, on) / (operations(model, workload) / rates.operations)
