"""What can be asked of `shardwise train`: small sections, checked when made, that travel to the ranks as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from shardwise.config.sections import Section
from shardwise.errors import ConfigError

Precision = Literal["fp32", "bf16", "fp16"]


class Data(Section):
    """What is trained on."""

    paths: tuple[str, ...] = Field(default=(), description="text files, folders, or one file of tokens")
    glob: str = Field(default="*", min_length=1, description="which files of folders")
    vocab: int | None = Field(default=None, ge=2, description="different tokens in a file of tokens")
    held_out: float = Field(default=0.02, ge=0, lt=1, description="part that validates")


class Model(Section):
    """A named size, and what replaces its dimensions."""

    size: str = "small"
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    context: int | None = None


class Updates(Section):
    """How many updates, on how much, at what rate."""

    steps: int = Field(default=800, ge=1)
    batch: int | None = Field(default=None, ge=1, description="sequences per step over all ranks")
    accumulate: int | None = Field(default=None, ge=1, description="micro-batches per step")
    lr: float | None = Field(default=None, gt=0)
    schedule: Literal["cosine", "linear", "constant"] | None = None
    warmup: int | None = Field(default=None, ge=0)
    seed: int = Field(default=0, ge=0)


class Placing(Section):
    """Where and how it runs."""

    config: str = Field(default="zero3", description="a preset, or a native, DeepSpeed or Accelerate file")
    precision: Precision | None = None
    clip: float | None = Field(default=None, ge=0)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    nproc: int | None = Field(default=None, ge=1)
    foresee: bool = Field(default=True, description="a dry run tells the memory first")


class Intervals(Section):
    """Steps between events; 0 is never, None is chosen from the number of steps."""

    log: int | None = Field(default=None, ge=1)
    eval: int | None = Field(default=None, ge=0)
    save: int | None = Field(default=None, ge=0)
    eval_samples: int = Field(default=256, ge=1)


class Outputs(Section):
    """What is written, and where."""

    out: Path = Path("runs/train")
    resume: Path | None = Field(default=None, description="checkpoints of another run to start from")
    fresh: bool = False
    keep: int = Field(default=2, ge=1, description="checkpoints kept")
    plot: bool = True
    tensorboard: bool = False
    prompt: str = Field(default="import os\n\n\ndef ", min_length=1)
    sample: int = Field(default=400, ge=0, description="tokens of the sample")


class Options(Section):
    """All of it."""

    data: Data = Data()
    model: Model = Model()
    updates: Updates = Updates()
    placing: Placing = Placing()
    intervals: Intervals = Intervals()
    outputs: Outputs = Outputs()
    debug: bool = False


_FLAGS = {"eval": "eval-every", "save": "save-every", "log": "log-every"}


def options_of(**sections: Any) -> Options:
    """Options from plain values; a ConfigError names the option of the command line that is wrong."""
    try:
        return Options(**sections)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][-1])
        flag = _FLAGS.get(name, name).replace("_", "-")
        raise ConfigError(f"--{flag} {first['input']}: {first['msg'].lower()}") from None
