"""The sections of a configuration: small frozen models, one per concern, validated at construction.

Every field carries a one-line description, which `Config.explain()` prints. `ConfigSections` holds one of each and
checks what two of them must agree on. Named rows of placements are in `presets.py`.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

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

from shardwise.config.values import real
from shardwise.errors import ConfigError
from shardwise.sizes import parse_bytes, whole

if TYPE_CHECKING:  # torch loads when an optimizer is checked or built, not with the configuration
    import torch
    from torch.optim.lr_scheduler import LRScheduler

Sharding = Literal["replicated", "sharded"]
Tier = Literal["device", "host", "disk"]
DType = Literal["fp32", "bf16", "fp16"]
Order = Literal["local", "sharded"]

Count = Annotated[int, BeforeValidator(whole)]
Positive = Annotated[int, BeforeValidator(whole), Field(ge=1)]
Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Real = Annotated[float, BeforeValidator(real)]


class Section(BaseModel):
    """Base of all sections: frozen, and a key that is not a field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class KindPlacement(Section):
    """Where one kind rests."""

    sharding: Sharding = Field(default="replicated", description="copied to every rank, or split over the ranks")
    tier: Tier = Field(default="device", description="the memory it rests in: device, host (RAM) or disk (NVMe)")

    def __str__(self) -> str:
        return f"{self.sharding}, {self.tier}"


class Placement(Section):
    """Where the three kinds rest. A stage is one row of placements and nothing more."""

    weights: KindPlacement = Field(default=KindPlacement(), description="the copy that computes")
    grads: KindPlacement = Field(default=KindPlacement(), description="gradients until the update")
    optim: KindPlacement = Field(default=KindPlacement(), description="fp32 master copy and the optimizer's moments")

    @model_validator(mode="after")
    def _monotone(self) -> Self:
        for kind in ("weights", "grads", "optim"):
            own: KindPlacement = getattr(self, kind)
            if own.tier != "device" and own.sharding == "replicated":
                raise ValueError(
                    f"{kind} can leave the device only when sharded; set placement.{kind}.sharding: sharded"
                )
        if self.weights.sharding == "sharded" and self.optim.sharding == "replicated":
            raise ValueError("sharded weights need sharded optim (the weights are cast from its master copy)")
        if self.grads.tier == "disk":
            raise ValueError("grads rest on device or host, not on disk: they are written in every backward")
        return self


class LossScale(Section):
    """The factor on the loss that keeps fp16 gradients representable."""

    dynamic: StrictBool = Field(default=True, description="adapt the scale to overflows, or keep `initial`")
    initial: Real = Field(default=65536.0, gt=0, description="the scale of the first step")
    window: Positive = Field(default=1000, description="good steps before the scale doubles")
    hysteresis: Positive = Field(default=2, description="overflows before the scale halves")
    consecutive_hysteresis: StrictBool = Field(default=False, description="a good step resets the hysteresis count")
    minimum: Real = Field(default=1.0, gt=0, description="the scale never goes below this")


class Precision(Section):
    """The dtypes of computation, of accumulation and on the wire."""

    compute: DType = Field(default="fp32", description="dtype of forward and backward")
    autocast: StrictBool = Field(default=False, description="fp32 weights; torch.autocast chooses per operation")
    cast_inputs: StrictBool = Field(default=True, description="cast floating-point inputs to `compute`")
    reduce_dtype: DType | None = Field(default=None, description="dtype of gradients on the wire (none: not cast)")
    accumulate_dtype: DType | None = Field(
        default=None, description="dtype gradients are added up in (none: fp32 when K > 1, else that of the weights)"
    )
    loss_scale: LossScale = Field(default=LossScale(), description="fp16 only")

    @model_validator(mode="after")
    def _loss_scale_is_for_fp16(self) -> Self:
        if self.compute != "fp16" and self.loss_scale != LossScale():
            raise ValueError(f"loss_scale applies to compute: fp16 only, and compute is {self.compute}")
        if self.autocast and self.compute == "fp32":
            raise ValueError("autocast needs a 16-bit dtype; set compute: bf16 or fp16")
        return self

    @property
    def weights_dtype(self) -> DType:
        """The dtype of the weights: `compute`, or fp32 under autocast."""
        return "fp32" if self.autocast else self.compute


class Gradients(Section):
    """How gradients are added up, reduced and clipped."""

    clip_norm: Annotated[float, BeforeValidator(real), Field(gt=0)] | None = Field(
        default=None, description="largest global norm (none: no clipping)"
    )
    order: Order | None = Field(
        default=None,
        description="local: add up, reduce once; sharded: reduce each micro-batch (none: as placed)",
    )
    reduce_at: Literal["backward", "step"] = Field(
        default="backward", description="reduce during backward, or in step()"
    )
    deterministic: StrictBool = Field(default=False, description="the same bits for every unit size as well")
    reduce_bucket_bytes: Bytes | None = Field(default=None, description="upper bound per reduction (none: one unit)")


class Aio(Section):
    """How the disk is read and written."""

    block_bytes: Annotated[Bytes, Field(ge=1)] = Field(default=1 << 20, description="size of one read or write")
    queue_depth: Positive = Field(default=32, description="upper bound of requests in flight")
    threads: Positive = Field(default=8, description="threads that issue requests (at least 8 are used)")


def _memory(value: object) -> object:
    return value if value is None or value == "auto" else parse_bytes(value)


class Offload(Section):
    """Budgets and buffers of states off the device."""

    nvme_path: StrictStr | None = Field(default=None, min_length=1, description="folder for states on disk")
    weights_nvme_path: StrictStr | None = Field(
        default=None, min_length=1, description="the weights' own folder (none: nvme_path)"
    )
    pin_memory: StrictBool = Field(default=True, description="page-lock host buffers, so that copies overlap")
    update: Literal["device", "host", "split"] = Field(
        default="device", description="where states off the device are updated"
    )
    host_share: Annotated[float, BeforeValidator(real), Field(ge=0, le=1)] | None = Field(
        default=None, description="part of the states that `update: split` updates on the host (none: measured)"
    )
    device_memory: Annotated[int | Literal["auto"] | None, BeforeValidator(_memory)] = Field(
        default=None, description="device budget: states beyond it are offloaded"
    )
    host_memory: Annotated[int | Literal["auto"] | None, BeforeValidator(_memory)] = Field(
        default=None, description="host budget: states beyond it go to the disk, or stay on the device"
    )
    ratio: Annotated[float, BeforeValidator(real), Field(ge=0, le=1)] = Field(
        default=1.0, description="part of the optimizer states that leaves the device"
    )
    buffer_count: Positive | None = Field(default=None, description="upper bound of transfer buffers (none: derived)")
    buffer_bytes: Bytes | None = Field(default=None, description="upper bound per buffer (none: one unit)")
    aio: Aio = Field(default=Aio(), description="disk requests")


class BatchSizes(NamedTuple):
    """The batch triple of one world size: global_size = micro_size x accumulation x W."""

    micro_size: int | None
    accumulation: int
    global_size: int | None


class Batch(Section):
    """The batch triple: global_batch_size = micro_batch_size x accumulation x W; any two give the third."""

    accumulation: Positive = Field(default=1, description="micro-batches per step (K)")
    micro_batch_size: Positive | None = Field(default=None, description="samples per rank and micro-batch")
    global_batch_size: Positive | None = Field(default=None, description="samples per step over all ranks")

    @model_validator(mode="after")
    def _multiplies_for_some_world_size(self) -> Self:
        step = (self.micro_batch_size or 1) * (self.accumulation if self._accumulation_given else 1)
        if self.global_batch_size is not None and self.global_batch_size % step:
            raise ValueError(f"global_batch_size {self.global_batch_size} is no multiple of {self._factors()} = {step}")
        return self

    @model_serializer(mode="wrap")
    def _keep_unset_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave an open accumulation out of a dump. Reading it back as given would fix all three of the triple."""
        fields: dict[str, Any] = handler(self)
        if not self._accumulation_given:
            fields.pop("accumulation", None)
        return fields

    @property
    def _accumulation_given(self) -> bool:
        return "accumulation" in self.model_fields_set

    def _factors(self) -> str:
        parts = [f"micro_batch_size {self.micro_batch_size}"] if self.micro_batch_size else []
        return " x ".join([*parts, f"accumulation {self.accumulation}"] if self._accumulation_given else parts)

    def resolve(self, world_size: int) -> BatchSizes:
        """The complete triple for `world_size` ranks.

        >>> Batch(global_batch_size=24, micro_batch_size=3).resolve(world_size=4)
        BatchSizes(micro_size=3, accumulation=2, global_size=24)
        """
        micro, total = self.micro_batch_size, self.global_batch_size
        if total is None:
            return BatchSizes(micro, self.accumulation, micro and micro * self.accumulation * world_size)
        given = (micro or 1) * (self.accumulation if self._accumulation_given or micro is None else 1) * world_size
        if total % given or (micro is not None and self._accumulation_given and total != given):
            factors = " x ".join(filter(None, [self._factors(), f"W {world_size}"]))
            raise ConfigError(
                f"the batch triple does not multiply: global_batch_size is {total}, but {factors} = {given}; "
                "change one of them, or leave one out to have it derived"
            )
        if micro is None:
            return BatchSizes(total // given, self.accumulation, total)
        return BatchSizes(micro, self.accumulation if self._accumulation_given else total // given, total)


class OptimizerSection(Section):
    """The optimizer to build when the caller passes none."""

    name: StrictStr = Field(description="Adam, AdamW, SGD, Lion or any name of torch.optim")
    params: dict[str, Any] = Field(default={}, description="keyword arguments: lr, betas, weight_decay, ...")

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
    params: dict[str, Any] = Field(default={}, description="keyword arguments: warmup_num_steps, total_num_steps, ...")

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

    enabled: StrictBool = Field(default=False, description="recompute a unit's activations in backward")
    offload: StrictBool = Field(default=False, description="keep saved activations in host memory")


class Runtime(Section):
    """Units, prefetch and printing."""

    units: Literal["auto"] | tuple[StrictStr, ...] = Field(
        default="auto", description="auto: repeated blocks; or class names, module paths"
    )
    min_unit_bytes: Bytes | None = Field(default=None, description="smaller neighbouring blocks are merged")
    prefetch: Count = Field(default=1, description="units gathered ahead of use")
    prefetch_bytes: Bytes | None = Field(default=None, description="upper bound gathered ahead of use")
    max_gathered_bytes: Bytes | None = Field(default=None, description="above this, no unit is gathered ahead")
    gather_bucket_bytes: Bytes | None = Field(
        default=None, description="small blocks are merged up to this (none: 32MiB)"
    )
    whole_tensors: StrictBool = Field(
        default=False, description="optimizers get whole tensors (Muon and Adafactor always do)"
    )
    use_cpu: StrictBool = Field(default=False, description="use the CPU even where there is a GPU")
    steps_per_print: Positive | None = Field(default=None, description="steps between printed lines (none: silent)")
    timers: StrictBool = Field(default=False, description="time every phase (waits for the device)")


class ConfigSections(Section):
    """All sections of a configuration, and the rules that two of them must agree on."""

    placement: Placement = Field(default=Placement(), description="where weights, grads and optim rest")
    precision: Precision = Field(default=Precision(), description="dtypes")
    gradients: Gradients = Field(default=Gradients(), description="accumulation, reduction, clipping")
    offload: Offload = Field(default=Offload(), description="budgets and buffers of states off the device")
    batch: Batch = Field(default=Batch(), description="the batch triple")
    optimizer: OptimizerSection | None = Field(
        default=None, description="the optimizer to build, if the caller passes none"
    )
    scheduler: SchedulerSection | None = Field(default=None, description="the learning-rate schedule to build")
    checkpointing: Checkpointing = Field(default=Checkpointing(), description="activation checkpointing")
    runtime: Runtime = Field(default=Runtime(), description="units, prefetch, printing")

    @property
    def order(self) -> Order:
        """The order of accumulation in effect: local (add up, reduce once) or sharded (reduce each micro-batch)."""
        return "local" if self.placement.grads.sharding == "replicated" else "sharded"

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
                "local goes with replicated, sharded with sharded; leave one of the two out"
            )
        if gradients.reduce_at == "step" and self.order == "sharded":
            raise ValueError("gradients.reduce_at: step needs replicated grads (sharded ones are reduced in backward)")
        for kind, path in self._disk_folders():
            if path is None:
                raise ValueError(f"{kind} rest on disk (nvme): give the folder, offload.nvme_path")
        if self.offload.update != "device" and placement.optim.tier == "device":
            raise ValueError(f"offload.update: {self.offload.update} needs optim off the device")
        if gradients.deterministic and self.offload.update != "device":
            raise ValueError("deterministic needs offload.update: device (host kernels round differently)")
        return self

    def _disk_folders(self) -> Iterator[tuple[str, str | None]]:
        if self.placement.optim.tier == "disk":
            yield "optim", self.offload.nvme_path
        if self.placement.weights.tier == "disk":
            yield "weights", self.offload.weights_nvme_path or self.offload.nvme_path
