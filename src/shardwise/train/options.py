"""The options of `shardwise train`: small sections, validated at construction, sent to the ranks as JSON.

Every field is an option of the command line, which has its default and help text from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwise.checks import LARGEST_SEED, MOST_SAMPLES, MOST_STEPS
from shardwise.errors import ConfigError


class OptionSection(BaseModel):
    """Base of the sections. The title is that of a panel in the help."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DataOptions(OptionSection, title="Data"):
    paths: list[str] = Field(
        default=[],
        description="Text files, folders, or one .npy/.bin token file (default: Python's standard library).",
    )
    glob: str = Field(default="*", min_length=1, description="Which files of folders to read.")
    vocab: int | None = Field(default=None, ge=2, le=2**31, description="Vocabulary size of a token file.")
    held_out: float = Field(default=0.02, ge=0, lt=1, description="Part of the data for validation.")


class ModelOptions(OptionSection, title="Model"):
    """A named size, and dimensions that replace its own."""

    size: str = Field(default="small", description="nano, small, 10m, 100m, 1b or 7b.")
    layers: int | None = Field(default=None, ge=1, le=10**5, description="Layers, instead of the size's.")
    hidden: int | None = Field(default=None, ge=1, le=10**6, description="Hidden width.")
    heads: int | None = Field(default=None, ge=1, le=10**6, description="Attention heads.")
    context: int | None = Field(default=None, ge=1, le=10**8, description="Tokens per sequence.")


class UpdateOptions(OptionSection, title="Training"):
    steps: int = Field(default=800, ge=1, le=MOST_STEPS, description="Total training steps.")
    batch: int | None = Field(
        default=None, ge=1, le=MOST_SAMPLES, description="Sequences per step over all ranks (default: 16)."
    )
    accumulate: int | None = Field(
        default=None, ge=1, le=MOST_SAMPLES, description="Micro-batches per step (default: 1)."
    )
    lr: float | None = Field(default=None, gt=0, le=1e6, description="Highest learning rate (default: by model width).")
    schedule: Literal["cosine", "linear", "constant"] | None = Field(
        default=None, description="cosine, linear or constant, after the warm-up."
    )
    warmup: int | None = Field(
        default=None, ge=0, le=MOST_STEPS, description="Warm-up steps (default: 5 % of the steps)."
    )
    seed: int = Field(default=0, ge=0, le=LARGEST_SEED, description="Seed of weights, data order and sample.")


class PlacingOptions(OptionSection, title="Where and how it runs"):
    config: str = Field(default="zero3", description="A preset, or a native, DeepSpeed or Accelerate file.")
    precision: Literal["fp32", "bf16", "fp16"] | None = Field(default=None, description="fp32, bf16 or fp16.")
    clip: float | None = Field(
        default=None, ge=0, le=1e30, description="Largest gradient norm; 0 disables clipping (default: 1)."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto, cpu or cuda.")
    nproc: int | None = Field(default=None, ge=1, le=10**4, description="Local ranks (default: one per GPU, else 2).")
    tp: int = Field(default=1, ge=1, le=10**4, description="Ranks that hold one copy of the model (tensor parallel).")
    pp: int = Field(default=1, ge=1, le=10**4, description="Stages that the layers are spread over (pipeline).")
    foresee: bool = Field(default=True, description="Predict the memory of a rank first.")


class OutputOptions(OptionSection, title="Progress and files"):
    out: Path = Field(default=Path("runs/train"), description="Output folder of the run.")
    resume: Path | None = Field(default=None, description="Start from the checkpoints of another run.")
    fresh: bool = Field(default=False, description="Delete the run in --out and start over.")
    keep: int = Field(default=2, ge=1, le=10**6, description="Number of checkpoints to keep.")
    plot: bool = Field(default=True, description="Plot loss and memory.")
    tensorboard: bool = Field(default=False, description="Also write TensorBoard files.")
    prompt: str = Field(default="import os\n\n\ndef ", min_length=1, description="Text that the sample starts with.")
    sample: int = Field(default=400, ge=0, le=10**6, description="Tokens to sample at the end.")


class IntervalOptions(OptionSection, title="Progress and files"):
    """Steps between events; None is derived from the number of steps."""

    log_every: int | None = Field(default=None, ge=1, le=MOST_STEPS, description="Steps between progress lines.")
    eval_every: int | None = Field(
        default=None, ge=0, le=MOST_STEPS, description="Steps between validations; 0: only at the end."
    )
    eval_samples: int = Field(default=256, ge=1, le=MOST_SAMPLES, description="Sequences per validation.")
    save_every: int | None = Field(
        default=None, ge=0, le=MOST_STEPS, description="Steps between checkpoints; 0: only at the end."
    )


class TrainOptions(OptionSection):
    """All sections."""

    data: DataOptions = DataOptions()
    model: ModelOptions = ModelOptions()
    updates: UpdateOptions = UpdateOptions()
    placing: PlacingOptions = PlacingOptions()
    outputs: OutputOptions = OutputOptions()
    intervals: IntervalOptions = IntervalOptions()
    debug: bool = False


SECTIONS: dict[str, type[OptionSection]] = {
    name: type(field.default)
    for name, field in TrainOptions.model_fields.items()
    if isinstance(field.default, OptionSection)
}


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
    sections = {name: {key: values[key] for key in section.model_fields} for name, section in SECTIONS.items()}
    return options_of(debug=values["debug"], **sections)
