"""What is trained: the model, as far as it is known, and the shape of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.config import Config
from shardwise.config.files import read_file
from shardwise.errors import ConfigError
from shardwise.models import loading
from shardwise.models.built_in import BUILT_IN, Build
from shardwise.models.catalog import find, from_config
from shardwise.models.dimensions import Dimensions

PRECISIONS = ("bf16", "fp16", "fp32")
DEFAULT_TARGETS = ("q_proj", "v_proj")
Lora = tuple[int, tuple[str, ...]]
"""The rank of adapters, and the names of the matrices that have one."""


@dataclass(frozen=True)
class ModelSpec:
    """What is known of a model: its size, and either dimensions or a function that builds it, or neither.

    `trainable` is less than `parameters` if some are frozen.
    """

    name: str
    parameters: int
    trainable: int
    dimensions: Dimensions | None = None
    build: Build | None = None

    @property
    def frozen(self) -> int:
        return self.parameters - self.trainable

    def part(self, tp: int) -> ModelSpec:
        """What one of `tp` GPUs holds that have one copy of the model together."""
        if tp == 1:
            return self
        if self.dimensions is None or self.frozen:
            raise ConfigError(
                f"--tp {tp} needs a model whose dimensions are known, without adapters: name one of the catalog or a "
                "config.json, and leave out --params and --lora"
            )
        cut = self.dimensions.part(tp)
        return replace(self, parameters=cut.parameters, trainable=cut.parameters, dimensions=cut)


@dataclass(frozen=True)
class Workload:
    """A training step: tokens of a micro-batch, micro-batches, precision, recomputation and adapters.

    `tp` is how many GPUs hold one copy of the model, or of a stage, together; `pp` is how many the layers are spread
    over, by a `schedule` of torch's.
    """

    sequence: int = 2048
    micro_batch: int = 1
    accumulation: int = 1
    precision: str = "bf16"
    optimizer: str = "AdamW"
    checkpointing: bool = True
    lora: Lora | None = None
    tp: int = 1
    pp: int = 1
    schedule: str = "1F1B"

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ConfigError(f"unknown precision {self.precision!r}: choose from {', '.join(PRECISIONS)}")
        for name in ("sequence", "micro_batch", "accumulation"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name.replace('_', '-')} is {getattr(self, name)}: it must be at least 1")

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one rank."""
        return self.sequence * self.micro_batch

    def for_global_batch(self, global_batch: int, world_size: int) -> Workload:
        """The same with the accumulation that makes `global_batch` samples per step."""
        each = self.micro_batch * world_size
        if global_batch % each:
            raise ConfigError(
                f"--global-batch {global_batch} is no multiple of micro-batch x GPUs = {self.micro_batch} x "
                f"{world_size} = {each}"
            )
        return replace(self, accumulation=global_batch // each)

    def config(self, preset: str) -> Config:
        """The configuration of a preset for this workload."""
        return Config.load(
            {
                "preset": preset,
                "precision": {"compute": self.precision},
                "batch": {"accumulation": self.accumulation, "micro_batch_size": self.micro_batch},
                "gradients": {"clip_norm": 1.0},
                "checkpointing": {"enabled": self.checkpointing},
                "optimizer": {"name": self.optimizer},
            }
        )


def find_model(name: str | None, parameters: int | None, workload: Workload) -> ModelSpec:
    """The model that a user names: by size, known name, config.json, model folder, or `file.py:function`.

    The models built into `shardwise compare` count as functions.
    """
    if (name is None) == (parameters is None):
        raise ConfigError("name the model or its size, one of the two: `shardwise plan llama3-8b`, or --params 8e9")
    if parameters is not None:
        if workload.lora is not None:
            raise ConfigError("--lora needs a model whose dimensions are known: name one instead of --params")
        return from_parameters(parameters)
    assert name is not None
    if not name.strip():
        raise ConfigError("the name of the model is empty: name one, as in `shardwise plan llama3-8b`")
    if name in BUILT_IN or (":" in name and not Path(name).exists()):
        return _from_function(name, workload)
    return from_dimensions(_dimensions(name), workload.lora)


def from_parameters(parameters: int) -> ModelSpec:
    """A model of which only the size is known."""
    if parameters < 1:
        raise ConfigError("--params: at least one parameter is needed")
    return ModelSpec(f"{parameters / 1e9:g}B parameters", parameters, parameters)


def from_dimensions(of: Dimensions, lora: Lora | None) -> ModelSpec:
    """A model of known dimensions, trained whole or frozen with adapters."""
    if lora is None:
        return ModelSpec(of.name, of.parameters, of.parameters, of)
    added = of.lora_numel(*lora)
    return ModelSpec(f"{of.name} with LoRA of rank {lora[0]}", of.parameters + added, added, of)


def _dimensions(name: str) -> Dimensions:
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{name}: the folder has no config.json")
        path = path / "config.json"
    if path.is_file():
        return from_config(read_file(path), path.parent.name or path.name)
    if path.suffix in (".json", ".py") or name.count("/") > 1:
        raise ConfigError(f"{name}: no such file or folder")
    return find(name)


def _from_function(name: str, workload: Workload) -> ModelSpec:
    """The user's own model, built on fake tensors to count its parameters."""
    if workload.lora is not None:
        raise ConfigError("--lora with file.py:function: add the adapters to the model in that function")
    loading.check_name(name)
    with FakeTensorMode(allow_non_fake_inputs=True):
        params = [*loading.load(name, "cpu")[0].parameters()]
    total = sum(param.numel() for param in params)
    trainable = sum(param.numel() for param in params if param.requires_grad)
    return ModelSpec(name, total, trainable, build=partial(loading.load, name, "cpu"))
