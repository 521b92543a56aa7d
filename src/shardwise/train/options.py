"""The options of `shardwise train`: small sections, validated at construction, sent to the ranks as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from shardwise.config.sections import Section
from shardwise.errors import ConfigError

Precision = Literal["fp32", "bf16", "fp16"]


class DataOptions(Section):
    """The training data."""

    paths: tuple[str, ...] = Field(default=(), description="text files, folders, or one token file")
    glob: str = Field(default="*", min_length=1, description="which files of folders to read")
    vocab: int | None = Field(default=None, ge=2, description="vocabulary size of a token file")
    held_out: float = Field(default=0.02, ge=0, lt=1, description="part for validation")


class ModelOptions(Section):
    """A named size, and dimensions that replace its own."""

    size: str = "small"
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    context: int | None = None


class UpdateOptions(Section):
    """Steps, batch and learning rate."""

    steps: int = Field(default=800, ge=1)
    batch: int | None = Field(default=None, ge=1, description="sequences per step over all ranks")
    accumulate: int | None = Field(default=None, ge=1, description="micro-batches per step")
    lr: float | None = Field(default=None, gt=0)
    schedule: Literal["cosine", "linear", "constant"] | None = None
    warmup: int | None = Field(default=None, ge=0)
    seed: int = Field(default=0, ge=0)


class PlacingOptions(Section):
    """Configuration, precision and processes."""

    config: str = Field(default="zero3", description="a preset, or a native, DeepSpeed or Accelerate file")
    precision: Precision | None = None
    clip: float | None = Field(default=None, ge=0)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    nproc: int | None = Field(default=None, ge=1)
    foresee: bool = Field(default=True, description="predict the memory by a dry run first")


class IntervalOptions(Section):
    """Steps between events; 0 means only at the end, None is derived from the number of steps."""

    log_every: int | None = Field(default=None, ge=1)
    eval_every: int | None = Field(default=None, ge=0)
    save_every: int | None = Field(default=None, ge=0)
    eval_samples: int = Field(default=256, ge=1)


class OutputOptions(Section):
    """Output files."""

    out: Path = Path("runs/train")
    resume: Path | None = Field(default=None, description="checkpoints of another run to start from")
    fresh: bool = False
    keep: int = Field(default=2, ge=1, description="number of checkpoints to keep")
    plot: bool = True
    tensorboard: bool = False
    prompt: str = Field(default="import os\n\n\ndef ", min_length=1)
    sample: int = Field(default=400, ge=0, description="tokens to sample at the end")


class TrainOptions(Section):
    """All sections."""

    data: DataOptions = DataOptions()
    model: ModelOptions = ModelOptions()
    updates: UpdateOptions = UpdateOptions()
    placing: PlacingOptions = PlacingOptions()
    intervals: IntervalOptions = IntervalOptions()
    outputs: OutputOptions = OutputOptions()
    debug: bool = False


def options_of(**sections: Any) -> TrainOptions:
    """Options from plain values by section. A ConfigError names the command-line option that is wrong."""
    try:
        return TrainOptions(**sections)
    except ValidationError as error:
        first = error.errors()[0]
        flag = str(first["loc"][-1]).replace("_", "-")
        raise ConfigError(f"--{flag} {first['input']}: {first['msg'].lower()}") from None


def options_from(values: Mapping[str, Any]) -> TrainOptions:
    """Options from the parameters of the command line, each of which one section has under the same name."""
    given = {**values, "paths": tuple(values["paths"] or ())}
    sections: dict[str, Any] = {"debug": given["debug"]}
    for name, section in TrainOptions.model_fields.items():
        if isinstance(section.annotation, type) and issubclass(section.annotation, Section):
            sections[name] = {key: given[key] for key in section.annotation.model_fields}
    return options_of(**sections)
