"""`Config`: what the engine reads, with the origin of every value beside it."""

from collections.abc import Iterator
from os import PathLike
from typing import Any, Self

from pydantic import Field, PrivateAttr, ValidationError, model_validator

from shardwise.config.draft import Note, Origin
from shardwise.config.problems import config_error
from shardwise.config.sections import (
    Batch,
    Checkpointing,
    Gradients,
    Offload,
    OptimizerSection,
    Order,
    Placement,
    Precision,
    Runtime,
    SchedulerSection,
    Section,
)

ConfigLike = "Config | str | PathLike[str] | dict[str, Any]"


class Config(Section):
    """A whole configuration. Build one from sections, or let `Config.load` read a preset, a dict or a file.

    >>> Config.load("zero3").placement.weights.sharding
    'sharded'
    """

    placement: Placement = Field(default=Placement(), description="where weights, grads and optim rest")
    precision: Precision = Field(default=Precision(), description="dtypes")
    gradients: Gradients = Field(default=Gradients(), description="accumulation, reduction, clipping")
    offload: Offload = Field(default=Offload(), description="budgets and buffers of what rests off the device")
    batch: Batch = Field(default=Batch(), description="the batch triple")
    optimizer: OptimizerSection | None = Field(
        default=None, description="the optimizer to build, if the caller passes none"
    )
    scheduler: SchedulerSection | None = Field(default=None, description="the learning-rate schedule to build")
    checkpointing: Checkpointing = Field(default=Checkpointing(), description="activation checkpointing")
    runtime: Runtime = Field(default=Runtime(), description="units, prefetch, printing")

    # Not part of equality or hash: the same values are the same configuration wherever they came from.
    _origins: dict[str, Origin] = PrivateAttr(default_factory=dict)
    _notes: tuple[Note, ...] = PrivateAttr(default=())
    _source: str = PrivateAttr(default="")

    def __init__(self, **sections: Any) -> None:
        try:
            super().__init__(**sections)
        except ValidationError as error:
            raise config_error(error, "Config", {}) from None
        self._source = "Config(...)"
        self._origins.update((path, Origin("code")) for path in _given_paths(self, ""))

    @classmethod
    def load(cls, config: "Config | str | PathLike[str] | dict[str, Any]") -> "Config":
        """The configuration that `config` stands for.

        A preset's name, a path to a JSON or YAML file, a dict, or a Config. Files and dicts may be native,
        DeepSpeed's or Accelerate's; which one is recognised by their keys. Anything wrong is a `ConfigError`.
        """
        from shardwise.config.load import load  # the readers of other dialects load when first needed

        return load(config)

    @property
    def order(self) -> Order:
        """The order of accumulation in effect: local (add up, reduce once) or sharded (reduce each micro-batch)."""
        return "local" if self.placement.grads.sharding == "replicated" else "sharded"

    def for_world_size(self, world_size: int) -> "Config":
        """The same configuration with its batch triple worked out for `world_size` ranks (`ConfigError` if it does not
        multiply). K is `batch.accumulation` of the result; before, it may still be open.

        >>> config = Config.load({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3})
        >>> config.for_world_size(4).batch.accumulation
        2
        """
        micro, accumulation, total = self.batch.resolve(world_size)
        batch = Batch(accumulation=accumulation, micro_batch_size=micro, global_batch_size=total)
        resolved = self.model_copy(update={"batch": batch})
        found = {f"batch.{name}" for name in Batch.model_fields if getattr(batch, name) != getattr(self.batch, name)}
        resolved._origins = self._origins | dict.fromkeys(found, Origin("derived", f"W = {world_size}"))
        return resolved

    def origin(self, path: str) -> Origin:
        """Where the value at a path such as "precision.compute" came from."""
        return self._origins.get(path, Origin("default"))

    def explain(self) -> str:
        """Every effective value, where it came from and what it does, as a text of 100 columns."""
        from shardwise.config.explain import explain

        return explain(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

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


def _given_paths(section: Section, prefix: str) -> Iterator[str]:
    for name in section.model_fields_set:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _given_paths(value, f"{prefix}{name}.")
        else:
            yield prefix + name
