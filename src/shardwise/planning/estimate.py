"""The analytic mode: the peak of a rank from sizes alone, at once.

A peak falls on one of three moments, and the highest counts:

    start of the backward   all activations and the logits are there, hardly any gradients
    end of the backward     gradients are all there, activations gone; units and parts of them in flight
    the update              gradients are there, one unit's in fp32 beside them
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from fractions import Fraction

import torch

from shardwise.config import Config
from shardwise.config.costs import offloaded_bytes_each, resting, resting_frozen, weight_bytes
from shardwise.config.shape import NodeShape, shape_of
from shardwise.memory.ledger import Ledger
from shardwise.models.dimensions import Dimensions
from shardwise.offload.context import OffloadContext
from shardwise.planning.kernels import CUBLAS_BYTES
from shardwise.planning.workload import ModelSpec, Workload

UNKNOWN_LAYERS = 32
"""Into so many units a model is cut of which only the size is known."""
LOGIT_BYTES = 12
"""Of each logit: in fp32, its log-softmax, and the gradient of that."""
CATEGORIES = ("weights", "grads", "master", "moments", "in flight", "activations", "logits", "overhead")


@dataclass(frozen=True)
class Estimate:
    """Device bytes of a rank at its peak by category, and what rests on other tiers (host, disk)."""

    categories: dict[str, int]
    tiers: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        return sum(self.categories.values())


def estimate(model: ModelSpec, workload: Workload, config: Config, ranks: int | NodeShape) -> Estimate:
    """The peak of one rank under a configuration. Under tensor parallelism, `model` is its part (`ModelSpec.part`)."""
    shape = shape_of(ranks)
    sizes = _Sizes(model, workload, config.for_shape(shape), shape)
    highest = max(sizes.backward_starts(), sizes.backward_ends(), sizes.update(), key=Counter.total)
    highest["overhead"] = CUBLAS_BYTES
    tiers = {tier: size for tier in ("host", "disk") if (size := sizes.at_rest(tier).total())}
    return Estimate({name: highest[name] for name in CATEGORIES}, tiers)


def away_bytes(model: ModelSpec, config: Config, world_size: int) -> list[int]:
    """What of each unit's states rests off the device, of one rank, in forward order; nothing of what is frozen."""
    each = offloaded_bytes_each(resting(config))
    return [each * numel // world_size for numel in _trained_units(model)]


def _trained_units(model: ModelSpec) -> list[int]:
    of = model.dimensions
    layers = of.layers if of else UNKNOWN_LAYERS
    if of is None or model.frozen:
        return [model.trainable // layers] * layers
    head = [] if of.tied else [of.embedding_numel]
    return [of.embedding_numel, *(of.layer_numel(index) for index in range(layers)), *head]


class _Sizes:
    """The sizes that the moments are made of."""

    def __init__(self, model: ModelSpec, workload: Workload, config: Config, shape: NodeShape) -> None:
        self.model, self.workload, self.config = model, workload, config
        self.shape, self.world_size = shape, shape.world_size
        of = model.dimensions
        self.unit = of.layer_numel() if of else model.parameters // UNKNOWN_LAYERS
        self.head = of.embedding_numel if of else self.unit
        self.trained_unit = max(_trained_units(model))
        self._offload = OffloadContext(
            torch.device("cpu"), Ledger(), config.offload, sum(_trained_units(model)) // self.world_size
        )
        self.item = weight_bytes(config)
        self.layer_bytes = layer_activation_bytes(of, workload, self.item) if of else 0
        self.input_bytes = workload.tokens * of.hidden * self.item if of else 0
        # Tensor parallelism cuts the head, and gathers its outputs.
        self.logit_bytes = LOGIT_BYTES * workload.tokens * of.vocabulary * workload.tp if of else 0

    def at_rest(self, tier: str = "device") -> Counter[str]:
        """Bytes on a tier by kind: all kinds of trainable parameters, and the weights of frozen ones."""
        parts = [(part, self.model.trainable) for part in resting(self.config)]
        parts += [(part, self.model.frozen) for part in resting_frozen(self.config.placement, self.item)]
        sizes: dict[str, Fraction] = defaultdict(Fraction)
        for part, numel in parts:
            if part.tier == tier:
                sizes[part.kind] += part.rank_bytes(numel, self.shape)
        return Counter({kind: int(size) for kind, size in sizes.items()})

    def gathered(self, numel: int) -> int:
        """Weights that are whole beside what rests: two units, where they rest sharded."""
        is_sharded = self.config.placement.weights.sharding != "replicated"
        return (numel + self.unit) * self.item if is_sharded else 0

    def backward_starts(self) -> Counter[str]:
        moment = self.at_rest()
        moment["weights"] += self.gathered(self.head)
        if self.config.batch.accumulation == 1:
            moment["grads"] = 0
        layers = self.model.dimensions.layers if self.model.dimensions else 0
        if self.workload.checkpointing:
            moment["activations"] = (layers + 1) * self.input_bytes
        else:
            moment["activations"] = layers * self.layer_bytes + 2 * self.input_bytes
        moment["logits"] = self.logit_bytes
        return moment

    def backward_ends(self) -> Counter[str]:
        moment = self.at_rest()
        slots, slot_bytes = self.pool()
        cuts_weights = self.config.placement.weights.sharding != "replicated"
        moment["weights"] += self.gathered(self.unit)
        is_sharded = self.config.placement.grads.sharding != "replicated"
        # A unit's gradients as they arrive; where they are sharded, another unit's on its way, sent and received. These
        # have left where states come ahead: all the more of them, as activations go.
        is_sent = is_sharded and self.world_size > 1 and (cuts_weights or not slots)
        moment["in flight"] = self.trained_unit * self.item * (3 if is_sent else 1)
        moment["in flight"] += max(0, min(2 * slots - 2, self.buckets)) * slot_bytes
        moment["activations"] = self.layer_bytes
        return moment

    def update(self) -> Counter[str]:
        moment = self.at_rest()
        slots, slot_bytes = self.pool()
        moment["in flight"] = self.owned * (4 if self.item == 2 else 0) + slots * slot_bytes
        return moment

    @property
    def owned(self) -> int:
        """Elements of the largest unit that a rank updates."""
        return self.trained_unit // self.shape.parts(self.config.placement.optim.sharding)

    @property
    def buckets(self) -> int:
        """In which all that a rank owns travels."""
        units = _trained_units(self.model)
        return sum(-(-numel // self.world_size // self._offload.bucket_numel) for numel in units)

    def pool(self) -> tuple[int, int]:
        """The buffers on the device through which states pass, and the bytes of one: as the engine reckons."""
        each = offloaded_bytes_each(resting(self.config))
        if not each:
            return 0, 0
        largest = min(self.owned, self._offload.bucket_numel)
        self._offload.expect(-(-self.owned // self._offload.bucket_numel))
        return self._offload.pool.count, each * largest


def layer_activation_bytes(of: Dimensions, workload: Workload, item: int) -> int:
    """What one layer keeps for its backward.

    Inputs and outputs of both norms (4 hidden), queries, keys, values and what attention gives, the gate, its
    activation, the other branch and their product; one fp32 number per head and token.
    """
    query, keys = of.heads * of.head_dim, of.kv_heads * of.head_dim
    each = 4 * of.hidden + 2 * query + 2 * keys
    if of.qk_norm:
        each += query + keys
    if of.norms == 4:
        each += 2 * of.hidden
    if of.experts is None:
        each += (4 if of.gated else 2) * of.width
    else:
        each += of.experts.used * (2 * of.hidden + 4 * of.experts.width) + 4 * of.experts.shared_width
    return workload.tokens * (item * each + 4 * of.heads)
