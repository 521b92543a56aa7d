"""The sections of a configuration: small frozen models, one a concern, validated when they are made.

Every field carries a one-line description, which `Config.explain()` prints. What two sections must agree on is
checked in `config.py`; which rows of placements have names is in `presets.py`.
"""

from typing import Annotated, Any, Literal, NamedTuple, Self

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
    """Where one kind of state rests."""

    sharding: Sharding = Field("replicated", description="copied to every rank, or cut up over the ranks")
    tier: Tier = Field("device", description="the memory it rests in: device, host (RAM) or disk (NVMe)")

    def __str__(self) -> str:
        return f"{self.sharding}, {self.tier}"


class Placement(Section):
    """Where the three kinds rest. A stage is a row of such placements and nothing more."""

    weights: KindPlacement = Field(KindPlacement(), description="the copy that computes")
    grads: KindPlacement = Field(KindPlacement(), description="gradients held until the update")
    optim: KindPlacement = Field(KindPlacement(), description="fp32 master copy and the optimizer's moments")

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
            raise ValueError("grads rest on device or host; what is reduced every step is not kept on disk")
        return self


class LossScale(Section):
    """The factor on the loss that keeps fp16 gradients in range."""

    dynamic: StrictBool = Field(True, description="grow and shrink the scale, or keep `initial` throughout")
    initial: Real = Field(65536.0, gt=0, description="the scale of the first step")
    window: Positive = Field(1000, description="steps without overflow before the scale doubles")
    hysteresis: Positive = Field(2, description="overflows to sit out before the scale halves")
    consecutive_hysteresis: StrictBool = Field(False, description="a good step resets the hysteresis count")
    minimum: Real = Field(1.0, gt=0, description="the scale never goes below this")


class Precision(Section):
    """The dtypes of computing, of accumulating and of the wire."""

    compute: DType = Field("fp32", description="dtype of forward and backward")
    autocast: StrictBool = Field(False, description="keep fp32 weights and let torch.autocast choose per operation")
    cast_inputs: StrictBool = Field(False, description="cast floating-point inputs of the model to `compute`")
    reduce_dtype: DType | None = Field(
        None, description="dtype of gradients on the wire (none: the one they are held in)"
    )
    accumulate_dtype: DType | None = Field(
        None, description="dtype gradients are held in (none: fp32 when K > 1, else that of the weights)"
    )
    loss_scale: LossScale = Field(LossScale(), description="fp16 only")

    @model_validator(mode="after")
    def _loss_scale_is_for_fp16(self) -> Self:
        if self.compute != "fp16" and self.loss_scale != LossScale():
            raise ValueError(f"loss_scale has a meaning with compute: fp16 only, and compute is {self.compute}")
        if self.autocast and self.compute == "fp32":
            raise ValueError("autocast needs a 16-bit dtype; set compute: bf16 or fp16")
        return self

    @property
    def weights_dtype(self) -> DType:
        """The dtype of the weights that rest: `compute`, or fp32 under autocast."""
        return "fp32" if self.autocast else self.compute


class Gradients(Section):
    """How gradients are added up, reduced and clipped."""

    clip_norm: Annotated[float, BeforeValidator(real), Field(gt=0)] | None = Field(
        None, description="clip the global norm to this (none: no clipping)"
    )
    order: Order | None = Field(
        None, description="local: add up, reduce once; sharded: reduce each micro-batch (none: as placed)"
    )
    reduce_at: Literal["backward", "step"] = Field(
        "backward", description="reduce under the last backward, or in step()"
    )
    deterministic: StrictBool = Field(False, description="the same bits for every unit and bucket size too")
    reduce_bucket_bytes: Bytes | None = Field(None, description="upper bound of one reduction (none: one unit)")


class Aio(Section):
    """How the disk is read and written."""

    block_bytes: Annotated[Bytes, Field(ge=1)] = Field(1 << 20, description="size of one read or write")
    queue_depth: Positive = Field(32, description="requests in flight")
    threads: Positive = Field(8, description="threads that issue them")


def _memory(value: object) -> object:
    return value if value is None or value == "auto" else parse_bytes(value)


class Offload(Section):
    """Budgets and buffers of what rests off the device."""

    nvme_path: StrictStr | None = Field(None, min_length=1, description="folder for what rests on disk")
    weights_nvme_path: StrictStr | None = Field(
        None, min_length=1, description="folder for weights on disk, where it is another one (none: nvme_path)"
    )
    pin_memory: StrictBool = Field(True, description="page-lock host buffers: copies overlap with computing")
    update: Literal["device", "host", "split"] = Field(
        "device", description="where states off the device are updated (device: bits as if they rested there)"
    )
    device_memory: Annotated[int | Literal["auto"] | None, BeforeValidator(_memory)] = Field(
        None, description="device budget: only what does not fit is spilled (none: spill all that is placed off it)"
    )
    host_memory: Annotated[int | Literal["auto"] | None, BeforeValidator(_memory)] = Field(
        None, description="host budget, before the disk is used"
    )
    ratio: Annotated[float, BeforeValidator(real), Field(ge=0, le=1)] = Field(
        1.0, description="part of the optimizer states that goes to their tier; the rest stays on the device"
    )
    buffer_count: Positive | None = Field(None, description="upper bound of transfer buffers (none: derived)")
    buffer_bytes: Bytes | None = Field(None, description="upper bound of one transfer buffer (none: one unit)")
    aio: Aio = Field(Aio(), description="disk requests")


class BatchSizes(NamedTuple):
    """The batch triple of one world size: global_size = micro_size x accumulation x W."""

    micro_size: int | None
    accumulation: int
    global_size: int | None


class Batch(Section):
    """The batch triple: global_batch_size = micro_batch_size x accumulation x W; any two give the third."""

    accumulation: Positive = Field(1, description="micro-batches per step (K)")
    micro_batch_size: Positive | None = Field(None, description="samples per rank and micro-batch")
    global_batch_size: Positive | None = Field(None, description="samples per step over all ranks")

    @model_validator(mode="after")
    def _multiplies_for_some_world_size(self) -> Self:
        step = (self.micro_batch_size or 1) * (self.accumulation if self._accumulation_given else 1)
        if self.global_batch_size is not None and self.global_batch_size % step:
            raise ValueError(f"global_batch_size {self.global_batch_size} is no multiple of {self._factors()} = {step}")
        return self

    @model_serializer(mode="wrap")
    def _keep_unset_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A dump must not turn an open accumulation into a given one: two of the triple would become three."""
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
        """The whole triple for `world_size` ranks.

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
                "change one of them, or leave one out and it is derived"
            )
        if micro is None:
            return BatchSizes(total // given, self.accumulation, total)
        return BatchSizes(micro, self.accumulation if self._accumulation_given else total // given, total)


class OptimizerSection(Section):
    """The optimizer to build when the caller passes none."""

    name: StrictStr = Field(description="Adam, AdamW, SGD, Lion or any name of torch.optim")
    params: dict[str, Any] = Field({}, description="keyword arguments: lr, betas, weight_decay, ...")

    @model_validator(mode="after")
    def _known(self) -> Self:
        from shardwise.config.build import check_optimizer  # torch's optimizers are not needed without a section

        self.__dict__.update(zip(("name", "params"), check_optimizer(self.name, self.params), strict=True))
        return self


class SchedulerSection(Section):
    """The learning-rate schedule to build."""

    name: StrictStr = Field(description="WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest")
    params: dict[str, Any] = Field({}, description="keyword arguments: warmup_num_steps, total_num_steps, ...")

    @model_validator(mode="after")
    def _known(self) -> Self:
        from shardwise.config.schedules import check

        self.__dict__.update(zip(("name", "params"), check(self.name, self.params), strict=True))
        return self


class Checkpointing(Section):
    """Activation checkpointing: trade a second forward for the memory of activations."""

    enabled: StrictBool = Field(False, description="recompute each unit's activations in backward")
    offload: StrictBool = Field(False, description="keep what checkpoints save in host memory")


class Runtime(Section):
    """Units, prefetch and what is printed."""

    units: Literal["auto"] | tuple[StrictStr, ...] = Field(
        "auto", description="auto: the repeated blocks; or class names and module paths"
    )
    min_unit_bytes: Bytes | None = Field(None, description="leftovers below this join a neighbour (none: derived)")
    prefetch: Count = Field(1, description="units gathered ahead of use")
    prefetch_bytes: Bytes | None = Field(None, description="upper bound of what is gathered ahead")
    max_gathered_bytes: Bytes | None = Field(None, description="gather nothing ahead while this much is gathered")
    gather_bucket_bytes: Bytes | None = Field(None, description="upper bound of one gather (none: one unit)")
    use_cpu: StrictBool = Field(False, description="train on the CPU even where a GPU is present")
    steps_per_print: Positive | None = Field(None, description="print a line every so many steps (none: never)")
    timers: StrictBool = Field(False, description="time every phase (each step then waits for the device)")
