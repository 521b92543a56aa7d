"""What is to be trained: a size or dimensions, and how a step looks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardwise.config import Config
from shardwise.errors import ConfigError
from shardwise.models.dimensions import Dimensions

if TYPE_CHECKING:
    from torch import nn

    from shardwise.models.built_in import MakeBatch

    Build = Callable[[], tuple[nn.Module, MakeBatch]]

PRECISIONS = ("bf16", "fp16", "fp32")
DEFAULT_TARGETS = ("q_proj", "v_proj")


@dataclass(frozen=True)
class Model:
    """What is known of the model: at least its parameters; dimensions; or the thing itself, as `build`.

    `trainable` is less than `parameters` where something is frozen.
    """

    name: str
    parameters: int
    trainable: int
    dimensions: Dimensions | None = None
    build: Build | None = None

    @property
    def frozen(self) -> int:
        return self.parameters - self.trainable


@dataclass(frozen=True)
class Workload:
    """How a step looks: tokens of a micro-batch, micro-batches, precision, what is recomputed, adapters."""

    sequence: int = 2048
    micro_batch: int = 1
    accumulation: int = 1
    precision: str = "bf16"
    optimizer: str = "AdamW"
    checkpointing: bool = True
    lora: tuple[int, tuple[str, ...]] | None = None

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ConfigError(f"unknown precision {self.precision!r}: choose from {', '.join(PRECISIONS)}")
        for name in ("sequence", "micro_batch", "accumulation"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name.replace('_', '-')} is {getattr(self, name)}: at least 1")

    @property
    def tokens(self) -> int:
        """Of one micro-batch on one rank."""
        return self.sequence * self.micro_batch

    def for_global_batch(self, global_batch: int, world_size: int) -> Workload:
        """With the accumulation that gives `global_batch` samples per step."""
        each = self.micro_batch * world_size
        if global_batch % each:
            raise ConfigError(
                f"--global-batch {global_batch} is no multiple of micro-batch x GPUs = {self.micro_batch} x "
                f"{world_size} = {each}"
            )
        return replace(self, accumulation=global_batch // each)

    def config(self, preset: str) -> Config:
        """The configuration of a preset for this workload."""
        from shardwise.config.presets import NVME_FOLDER, PRESETS

        settings: dict[str, Any] = {
            "preset": preset,
            "precision": {"compute": self.precision},
            "batch": {"accumulation": self.accumulation, "micro_batch_size": self.micro_batch},
            "gradients": {"clip_norm": 1.0},
            "checkpointing": {"enabled": self.checkpointing},
            "optimizer": {"name": self.optimizer},
        }
        if "disk" in (PRESETS[preset].optim.tier, PRESETS[preset].weights.tier):
            settings["offload"] = {"nvme_path": NVME_FOLDER}
        return Config.load(settings)


def from_parameters(parameters: int) -> Model:
    """A model of which nothing but the size is known."""
    if parameters < 1:
        raise ConfigError("--params: at least one parameter")
    return Model(f"{parameters / 1e9:g}B parameters", parameters, parameters)


def from_dimensions(of: Dimensions, lora: tuple[int, tuple[str, ...]] | None) -> Model:
    """A described model, whole or frozen under adapters."""
    if lora is None:
        return Model(of.name, of.parameters, of.parameters, of)
    added = of.lora_numel(*lora)
    return Model(f"{of.name} with LoRA of rank {lora[0]}", of.parameters + added, added, of)
