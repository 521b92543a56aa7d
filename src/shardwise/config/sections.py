"""The sections of a configuration: small frozen models, one per concern, validated at construction.

Every field carries a one-line description, which `Config.explain()` prints. `ConfigSections` holds one of each and
checks what two of them must agree on. Named rows of placements are in `presets.py`.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StrictBool,
    StrictStr,
    model_serializer,
    model_validator,
)

from shardwise.config.shape import Sharding, axes_between
from shardwise.config.values import is_open, real
from shardwise.errors import ConfigError
from shardwise.sizes import parse_bytes, whole

if TYPE_CHECKING:  # torch loads when an optimizer is checked or built, not with the configuration
    import torch
    from torch.optim.lr_scheduler import LRScheduler

Tier = Literal["device", "host", "disk"]
DType = Literal["fp32", "bf16", "fp16"]
Compute = Literal["fp32", "bf16", "fp16", "model"]
Order = Literal["local", "node", "sharded"]
SHARDING_OF_ORDER: dict[str, Sharding] = {"local": "replicated", "node": "node", "sharded": "sharded"}


def _memory(value: object) -> object:
    return value if is_open(value) else parse_bytes(value)


Count = Annotated[int, BeforeValidator(whole)]
Positive = Annotated[int, BeforeValidator(whole), Field(ge=1)]
Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Real = Annotated[float, BeforeValidator(real)]
Share = Annotated[Real, Field(ge=0, le=1)]
Memory = Annotated[int | Literal["auto"] | None, BeforeValidator(_memory)]


def setting(default: Any, description: str, **limits: Any) -> Any:
    """A field of a section. `Config.explain()` prints its description."""
    return Field(default=default, description=description, **limits)


class Section(BaseModel):
    """Base of all sections: frozen, and a key that is not a field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class KindPlacement(Section):
    """Where one kind rests."""

    sharding: Sharding = setting("replicated", "copied to every rank, or split over the ranks")
    tier: Tier = setting("device", "the memory it rests in: device, host (RAM) or disk (NVMe)")

    def __str__(self) -> str:
        return f"{self.sharding}, {self.tier}"


class Placement(Section):
    """Where the three kinds rest. A stage is one row of placements and nothing more."""

    weights: KindPlacement = setting(KindPlacement(), "the copy that computes")
    grads: KindPlacement = setting(KindPlacement(), "gradients until the update")
    optim: KindPlacement = setting(KindPlacement(), "fp32 master copy and the optimizer's moments")

    @model_validator(mode="after")
    def _monotone(self) -> Self:
        for kind, own in self:
            if own.tier != "device" and own.sharding == "replicated":
                remedy = f"set placement.{kind}.sharding: sharded"
                raise ValueError(f"{kind} can leave the device only when sharded; {remedy}")
            if own.tier != "device" and own.sharding == "node" and kind != "optim":
                remedy = f"set placement.{kind}.tier: device, or placement.{kind}.sharding: sharded"
                raise ValueError(f"{kind} that are sharded over a node rest on the device; {remedy}")
        if axes_between(self.weights.sharding, self.optim.sharding):
            raise ValueError(
                f"{self.weights.sharding} weights need sharded optim (the weights are cast from its master copy): set "
                f"placement.optim.sharding: {self.weights.sharding}"
            )
        if self.grads.tier == "disk":
            raise ValueError("grads rest on device or host, not on disk: they are written in every backward")
        return self


class LossScale(Section):
    """The factor on the loss that keeps fp16 gradients representable."""

    dynamic: StrictBool = setting(True, "adapt the scale to overflows, or keep `initial`")
    initial: Real = setting(65536.0, "the scale of the first step", gt=0)
    window: Positive = setting(1000, "good steps before the scale doubles")
    hysteresis: Positive = setting(2, "overflows before the scale halves")
    consecutive_hysteresis: StrictBool = setting(False, "a good step resets the hysteresis count")
    minimum: Real = setting(1.0, "the scale never goes below this", gt=0)


class Precision(Section):
    """The dtypes of computation, of accumulation and on the wire."""

    compute: Compute = setting("fp32", "dtype of forward and backward; model: that of the model's parameters")
    autocast: StrictBool = setting(False, "fp32 weights; torch.autocast chooses per operation")
    cast_inputs: StrictBool = setting(True, "cast floating-point inputs to `compute`")
    reduce_dtype: DType | None = setting(None, "dtype of gradients on the wire (none: not cast)")
    accumulate_dtype: DType | None = setting(
        None, "dtype gradients are added up in (none: fp32 when K > 1, else that of the weights)"
    )
    loss_scale: LossScale = setting(LossScale(), "fp16 only")

    @model_validator(mode="after")
    def _loss_scale_is_for_fp16(self) -> Self:
        if self.compute not in ("fp16", "model") and self.loss_scale != LossScale():
            raise ValueError(f"loss_scale applies to compute: fp16 only, and compute is {self.compute}")
        if self.autocast and self.compute in ("fp32", "model"):
            raise ValueError("autocast needs a 16-bit dtype; set compute: bf16 or fp16")
        return self

    @property
    def weights_dtype(self) -> DType:
        """The dtype of the weights: `compute`, or fp32 under autocast; 16 bits where only the model says it."""
        compute: DType = "bf16" if self.compute == "model" else self.compute
        return "fp32" if self.autocast else compute


class Gradients(Section):
    """How gradients are added up, reduced and clipped."""

    clip_norm: Annotated[Real, Field(gt=0)] | None = setting(None, "largest global norm (none: no clipping)")
    order: Order | None = setting(
        None, "local: add up, reduce once; sharded: reduce each micro-batch; node: in the node (none: as placed)"
    )
    reduce_at: Literal["backward", "step"] = setting("backward", "reduce during backward, or in step()")
    deterministic: StrictBool = setting(False, "the same bits for every unit size as well")
    reduce_bucket_bytes: Bytes | None = setting(None, "upper bound per reduction (none: one unit)")


class Aio(Section):
    """How the disk is read and written."""

    block_bytes: Annotated[Bytes, Field(ge=1)] = setting(1 << 20, "size of one read or write")
    queue_depth: Positive = setting(32, "upper bound of requests in flight")
    threads: Positive = setting(8, "threads that issue requests (at least 8 are used)")


class Offload(Section):
    """Budgets and buffers of states off the device."""

    nvme_path: StrictStr | None = setting(None, "folder for states on disk", min_length=1)
    weights_nvme_path: StrictStr | None = setting(None, "the weights' own folder (none: nvme_path)", min_length=1)
    pin_memory: StrictBool = setting(True, "page-lock host buffers, so that copies overlap")
    update: Literal["device", "host", "split"] = setting("device", "where states off the device are updated")
    host_share: Share | None = setting(
        None, "part of the states that `update: split` updates on the host (none: measured)"
    )
    device_memory: Memory = setting(None, "device budget: states beyond it are offloaded")
    host_memory: Memory = setting(None, "host budget: states beyond it go to the disk, or stay on the device")
    ratio: Share = setting(1.0, "part of the optimizer states that leaves the device")
    buffer_count: Positive | None = setting(None, "upper bound of transfer buffers (none: derived)")
    buffer_bytes: Bytes | None = setting(None, "upper bound per buffer (none: 64 MiB, less for small models)")
    aio: Aio = setting(Aio(), "disk requests")


class Batch(Section):
    """The batch triple: global_batch_size = micro_batch_size x accumulation x W; any two give the third."""

    accumulation: Positive = setting(1, "micro-batches per step (K)")
    micro_batch_size: Positive | None = setting(None, "samples per rank and micro-batch")
    global_batch_size: Positive | None = setting(None, "samples per step over all ranks")

    @model_validator(mode="after")
    def _multiplies_for_some_world_size(self) -> Self:
        factors, step = self._factors()
        if self.global_batch_size is not None and self.global_batch_size % step:
            raise ValueError(f"global_batch_size {self.global_batch_size} is no multiple of {factors} = {step}")
        return self

    @model_serializer(mode="wrap")
    def _keep_unset_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave an open accumulation out of a dump. Reading it back as given would fix all three of the triple."""
        fields: dict[str, Any] = handler(self)
        if "accumulation" not in self.model_fields_set:
            fields.pop("accumulation", None)
        return fields

    def _factors(self, **others: int) -> tuple[str, int]:
        """The given factors of the global batch as a text, and their product."""
        names = [name for name in ("micro_batch_size", "accumulation") if name in self.model_fields_set]
        given = {name: size for name in names if (size := getattr(self, name)) is not None} | others
        return " x ".join(f"{name} {size}" for name, size in given.items()), math.prod(given.values())

    def resolve(self, world_size: int) -> "Batch":
        """The complete triple for `world_size` ranks.

        >>> Batch(global_batch_size=24, micro_batch_size=3).resolve(world_size=4)
        Batch(accumulation=2, micro_batch_size=3, global_batch_size=24)
        """
        micro, accumulation, total = self.micro_batch_size, self.accumulation, self.global_batch_size
        factors, product = self._factors(W=world_size)
        is_complete = micro is not None and "accumulation" in self.model_fields_set
        if total is None:
            total = micro and micro * accumulation * world_size
        elif total % product or (is_complete and total != product):
            raise ConfigError(
                f"the batch triple does not multiply: global_batch_size is {total}, but {factors} = {product}; "
                "change one of them, or leave one out to have it derived"
            )
        elif micro is None:
            micro = total // product
        elif not is_complete:
            accumulation = total // product
        return Batch(accumulation=accumulation, micro_batch_size=micro, global_batch_size=total)


class OptimizerSection(Section):
    """The optimizer to build when the caller passes none."""

    name: StrictStr = Field(description="Adam, AdamW, SGD, Lion or any name of torch.optim")
    params: dict[str, Any] = setting({}, "keyword arguments: lr, betas, weight_decay, ...")

    @model_validator(mode="after")
    def _known(self) -> Self:
        from shardwise.config import optimizers

        self.__dict__.update(zip(("name", "params"), optimizers.check(self.name, self.params), strict=True))
        return self

    def build(self, params: Iterable[Any]) -> "torch.optim.Optimizer":
        """The optimizer on `params`: tensors, named tensors or parameter groups."""
        from shardwise.config import optimizers

        return optimizers.build(self.name, self.params, params)


class SchedulerSection(Section):
    """The learning-rate schedule to build."""

    name: StrictStr = Field(description="WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest")
    params: dict[str, Any] = setting({}, "keyword arguments: warmup_num_steps, total_num_steps, ...")

    @model_validator(mode="after")
    def _known(self) -> Self:
        from shardwise.config import schedules

        self.__dict__.update(zip(("name", "params"), schedules.check(self.name, self.params), strict=True))
        return self

    def build(self, optimizer: "torch.optim.Optimizer", *, total_steps: int | None = None) -> "LRScheduler":
        """The schedule on an optimizer; `total_steps` is the default of `total_num_steps`."""
        from shardwise.config import schedules

        return schedules.build(self.name, self.params, optimizer, total_steps)


class Checkpointing(Section):
    """Activation checkpointing: recompute activations in backward instead of storing them."""

    enabled: StrictBool = setting(False, "recompute a unit's activations in backward")
    offload: StrictBool = setting(False, "keep saved activations in host memory")


class MeshSection(Section):
    """The axes that the ranks span, outermost first. ZeRO's ranks are those of dp_replicate, dp_shard and sp."""

    pp: Positive = setting(1, "pipeline stages")
    dp_replicate: Positive | None = setting(None, "groups of ranks, each of which has a node's part (none: the nodes)")
    dp_shard: Positive | None = setting(None, "ranks of such a group (none: all that are left)")
    sp: Positive = setting(1, "ranks that share a sequence")
    tp: Positive = setting(1, "ranks that share each matrix")


class Communication(Section):
    """How gradients and weights travel between ranks."""

    reduce: Literal["exchange", "native"] = setting(
        "exchange", "exchange: sums in rank order; native: the backend's reduce-scatter, whose bits depend on it"
    )
    ranks_per_node: Positive | None = setting(None, "ranks of ZeRO that share a node (none: as launched)")


class Runtime(Section):
    """Units, prefetch and printing."""

    units: Literal["auto"] | tuple[StrictStr, ...] = setting(
        "auto", "auto: repeated blocks; or class names, module paths"
    )
    min_unit_bytes: Bytes | None = setting(None, "smaller neighbouring blocks are merged")
    prefetch: Count = setting(1, "units gathered ahead of use")
    prefetch_bytes: Bytes | None = setting(None, "upper bound gathered ahead of use")
    max_gathered_bytes: Bytes | None = setting(None, "above this, no unit is gathered ahead")
    gather_bucket_bytes: Bytes | None = setting(None, "small blocks are merged up to this (none: 32MiB)")
    whole_tensors: StrictBool = setting(False, "optimizers get whole tensors (by default those that need them)")
    use_cpu: StrictBool = setting(False, "use the CPU even where there is a GPU")
    steps_per_print: Positive | None = setting(None, "steps between printed lines (none: silent)")
    timers: StrictBool = setting(False, "time every phase (waits for the device)")
    timeout: Annotated[Real, Field(gt=0)] | None = setting(
        None, "seconds to wait for other ranks (none: the process group's)"
    )


class ConfigSections(Section):
    """All sections of a configuration, and the rules that two of them must agree on."""

    placement: Placement = setting(Placement(), "where weights, grads and optim rest")
    precision: Precision = setting(Precision(), "dtypes")
    gradients: Gradients = setting(Gradients(), "accumulation, reduction, clipping")
    offload: Offload = setting(Offload(), "budgets and buffers of states off the device")
    batch: Batch = setting(Batch(), "the batch triple")
    optimizer: OptimizerSection | None = setting(None, "the optimizer to build, if the caller passes none")
    scheduler: SchedulerSection | None = setting(None, "the learning-rate schedule to build")
    checkpointing: Checkpointing = setting(Checkpointing(), "activation checkpointing")
    runtime: Runtime = setting(Runtime(), "units, prefetch, printing")
    mesh: MeshSection = setting(MeshSection(), "the axes that the ranks span")
    communication: Communication = setting(Communication(), "how gradients and weights travel between ranks")

    @property
    def order(self) -> Order:
        """The order of accumulation in effect: local (add up, reduce once) or sharded (reduce each micro-batch)."""
        orders: dict[Sharding, Order] = {"replicated": "local", "node": "node", "sharded": "sharded"}
        return orders[self.placement.grads.sharding]

    @property
    def accumulate_dtype(self) -> DType:
        """The dtype in effect of gradients between backward and update. A sum of several micro-batches is fp32."""
        several = self.batch.accumulation > 1
        return self.precision.accumulate_dtype or ("fp32" if several else self.precision.weights_dtype)

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        placement, gradients = self.placement, self.gradients
        if gradients.order not in (None, self.order):
            raise ValueError(
                f"gradients.order is {gradients.order}, but placement.grads.sharding is {placement.grads.sharding}; "
                "local goes with replicated, node with node, sharded with sharded; leave one of the two out"
            )
        if gradients.reduce_at == "step" and self.order != "local":
            raise ValueError("gradients.reduce_at: step needs replicated grads (sharded ones are reduced in backward)")
        optim_path, weights_path = self.offload.nvme_path, self.offload.weights_nvme_path or self.offload.nvme_path
        for kind, own, path in (("optim", placement.optim, optim_path), ("weights", placement.weights, weights_path)):
            if own.tier == "disk" and path is None:
                raise ValueError(f"{kind} rest on disk (nvme): give the folder, offload.nvme_path")
        if self.offload.update != "device" and placement.optim.tier == "device":
            raise ValueError(f"offload.update: {self.offload.update} needs optim off the device")
        if gradients.deterministic and self.offload.update != "device":
            raise ValueError("deterministic needs offload.update: device (host kernels round differently)")
        return self
