"""`TrainJob`: the options of a run, checked and resolved for a number of ranks, and the `Shape` of its model.

Wrong options raise a ConfigError here, before any process starts. Neither torch nor a process group is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, cast

from pydantic import Field, ValidationError, model_validator

from shardwise.config import Config, costs
from shardwise.config.sections import Batch, Gradients, OptimizerSection, Precision, Section
from shardwise.config.values import nearest, one_of
from shardwise.errors import ConfigError
from shardwise.machine.memory import host_bytes
from shardwise.models.dimensions import Dimensions
from shardwise.sizes import format_bytes, format_count
from shardwise.train.corpus import BYTES, Corpus, open_corpus
from shardwise.train.data import BatchShare, Windows, split
from shardwise.train.options import TrainOptions

DEFAULT_BATCH = 16
DEFAULT_CLIP = 1.0
DEFAULT_RATE = 4e-3
"""For hidden widths up to 128; it falls with the width of larger models."""
RATE_WIDTH = 128
TOKEN_BYTES = 8
RATE_FLOOR = 0.1
"""Where the decay ends, as a part of the highest rate."""


class Shape(Section):
    """The dimensions of a decoder.

    >>> Shape(layers=2, hidden=64, heads=2, context=128).parameters
    139584
    """

    layers: int = Field(ge=1)
    hidden: int = Field(ge=8)
    heads: int = Field(ge=1)
    context: int = Field(ge=2)
    vocabulary: int = Field(default=BYTES, ge=2)

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden {self.hidden} must be a multiple of 2 x heads ({self.heads})")
        return self

    @property
    def dimensions(self) -> Dimensions:
        """The dimensions of a Llama. The width inside a layer is 8/3 of hidden, a multiple of 32."""
        width = -(-8 * self.hidden // 96) * 32
        return Dimensions("llama", self.hidden, self.layers, self.heads, self.vocabulary, width)

    @property
    def parameters(self) -> int:
        return self.dimensions.parameters

    def __str__(self) -> str:
        return (
            f"{format_count(self.parameters)} parameters: {self.layers} layers, hidden {self.hidden}, "
            f"{self.heads} heads, context {self.context}"
        )


SIZES: dict[str, dict[str, int]] = {
    "nano": {"layers": 2, "hidden": 32, "heads": 2, "context": 64},
    "small": {"layers": 4, "hidden": 128, "heads": 4, "context": 128},
    "10m": {"layers": 6, "hidden": 384, "heads": 6, "context": 256},
    "100m": {"layers": 12, "hidden": 768, "heads": 12, "context": 1024},
    "1b": {"layers": 24, "hidden": 2048, "heads": 16, "context": 2048},
    "7b": {"layers": 32, "hidden": 4096, "heads": 32, "context": 4096},
}


def model_shape(size: str, vocabulary: int, **given: int | None) -> Shape:
    """A named size with some of its dimensions replaced. Raises a ConfigError for an invalid one.

    >>> model_shape("small", 256, layers=8).layers
    8
    """
    if size not in SIZES:
        raise ConfigError(f"--size {size}: expected {one_of(SIZES)}{nearest(size, SIZES)}")
    values: dict[str, Any] = SIZES[size] | {key: value for key, value in given.items() if value is not None}
    try:
        return Shape(vocabulary=vocabulary, **values)
    except ValidationError as error:
        first = error.errors()[0]
        where = f"--{first['loc'][0]} {values.get(str(first['loc'][0]), vocabulary)}: " if first["loc"] else ""
        raise ConfigError(f"{where}{first['msg'].removeprefix('Value error, ')}") from None


@dataclass(frozen=True)
class TrainJob:
    """A run for `world_size` data-parallel ranks, each of which is `tp` x `pp` processes."""

    options: TrainOptions
    world_size: int
    corpus: Corpus
    shape: Shape
    config: Config

    @property
    def tp(self) -> int:
        return self.options.placing.tp

    @property
    def pp(self) -> int:
        return self.options.placing.pp

    @property
    def ranks(self) -> str:
        """How many ranks there are, in words."""
        axes = {name: size for name, size in (("pp", self.pp), ("tp", self.tp)) if size > 1}
        count = self.world_size * self.tp * self.pp
        listed = " x ".join(f"{name} {size}" for name, size in (axes | {"dp": self.world_size}).items())
        return f"{count} rank{'s' * (count > 1)}{f' ({listed})' if axes else ''}"

    @property
    def steps(self) -> int:
        return self.options.updates.steps

    @property
    def batch(self) -> int:
        """Sequences per step over all ranks."""
        return cast(int, self.config.batch.global_batch_size)  # `_batch` resolved it

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.shape.context

    def share(self, rank: int) -> BatchShare:
        return BatchShare(self.batch, self.config.batch.accumulation, rank, self.world_size)

    @cached_property
    def windows(self) -> tuple[Windows, Windows]:
        """The windows for training, and those for validation."""
        return split(self.corpus, self.shape.context, self.options.data.held_out)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint must match to be resumed: the model, and the data with its order."""
        return {
            "model": self.shape.model_dump(),
            "data": {
                "fingerprint": self.corpus.fingerprint,
                "held_out": self.options.data.held_out,
                "seed": self.options.updates.seed,
            },
        }

    @property
    def warmup(self) -> int:
        asked = self.options.updates.warmup
        return asked if asked is not None else min(1000, self.steps // 20)

    @property
    def rate(self) -> float:
        """The highest learning rate: as given, else smaller for wider models."""
        return self.options.updates.lr or DEFAULT_RATE * min(1.0, RATE_WIDTH / self.shape.hidden)

    def is_due(self, what: str, step: int) -> bool:
        """Whether to `log`, `eval` or `save` after `step` steps: always after the last one."""
        asked = getattr(self.options.intervals, f"{what}_every")
        least, parts = {"log": (10, 10), "eval": (1000, 5), "save": (1000, 4)}[what]
        every = asked if asked is not None else max(1, min(least, self.steps // parts))
        return step == self.steps or (every > 0 and step % every == 0)


def prepare(options: TrainOptions, ranks: int) -> TrainJob:
    """Open the corpus and resolve model, batch and configuration for `ranks` processes."""
    data, model, tp, pp = options.data, options.model, options.placing.tp, options.placing.pp
    each = tp * pp
    if ranks % each:
        asked = " ".join(f"--{name} {size}" for name, size in (("tp", tp), ("pp", pp)) if size > 1)
        does = "do not" if tp > 1 and pp > 1 else "does not"
        raise ConfigError(f"{asked} {does} divide {ranks} rank(s): take --nproc {each * max(1, ranks // each)}")
    world_size = ranks // each
    config = _config(options, world_size)
    corpus = open_corpus(data.paths, data.glob, data.vocab)
    shape = model_shape(model.size, corpus.vocabulary, **model.model_dump(exclude={"size"}))
    _check_tp(shape, tp)
    _check_pp(shape, pp, config)
    job = TrainJob(options, world_size, corpus, shape, config)
    job.windows  # noqa: B018  # raises now if there is too little text
    return job


def _check_tp(shape: Shape, tp: int) -> None:
    sizes = {"heads": shape.heads, "the width inside a layer": shape.dimensions.width, "vocabulary": shape.vocabulary}
    for what, size in sizes.items():
        if size % tp:
            raise ConfigError(f"--tp {tp} does not divide {what} ({size}): take one that does, or another --size")


def _check_pp(shape: Shape, pp: int, config: Config) -> None:
    if pp > shape.layers:
        raise ConfigError(f"--pp {pp} leaves a stage empty: the model has {shape.layers} layers, take at most as many")
    if pp > 1 and config.batch.accumulation < pp:
        raise ConfigError(
            f"--accumulate {config.batch.accumulation}: a pipeline of {pp} stages needs at least {pp} micro-batches"
        )


def check_memory(job: TrainJob, on_cpu: bool, local_ranks: int) -> None:
    """Raise a ConfigError if this machine has less memory than the run needs at the least.

    The tokens of a micro-batch are on the host; on the CPU, states and logits are too. A dry run says more, but can be
    switched off, and memory that the host lacks ends in a kill by the kernel.
    """
    config, shape, has = job.config, job.shape, host_bytes("MemTotal")
    micro = job.share(0).micro_batch
    batch_bytes = TOKEN_BYTES * micro * (shape.context + 1)
    if on_cpu:
        batch_bytes += micro * shape.context * shape.vocabulary * costs.weight_bytes(config)
        kinds = [kind for kind in costs.resting(config) if kind.tier != "disk"]
        state_bytes = local_ranks * costs.resting_bytes(kinds, shape.parameters // (job.tp * job.pp), job.world_size)
        if state_bytes > has:
            raise ConfigError(
                f"the states of {format_count(shape.parameters)} parameters need at least {format_bytes(state_bytes)} "
                f"on {local_ranks} rank(s) together, and this machine has {format_bytes(has)}: take a smaller --size, "
                "--config zero3_nvme, or more machines"
            )
    if local_ranks * batch_bytes > has:
        raise ConfigError(
            f"--batch {job.batch}: a micro-batch of {micro} sequences needs at least {format_bytes(batch_bytes)} on "
            f"each of {local_ranks} rank(s), and this machine has {format_bytes(has)}: lower --batch, or raise "
            "--accumulate"
        )


def _config(options: TrainOptions, world_size: int) -> Config:
    placing = options.placing
    loaded = Config.load(placing.config)
    sections: dict[str, Section] = {}
    if placing.precision is not None:
        sections["precision"] = Precision(compute=placing.precision)
    clip = DEFAULT_CLIP if placing.clip is None and loaded.gradients.clip_norm is None else placing.clip
    if clip is not None:
        given = loaded.gradients.model_dump(exclude_unset=True)
        sections["gradients"] = Gradients(**given | {"clip_norm": clip or None})
    if options.updates.lr is not None and loaded.optimizer is not None:
        params = loaded.optimizer.params | {"lr": options.updates.lr}
        sections["optimizer"] = OptimizerSection(name=loaded.optimizer.name, params=params)
    sections["batch"] = _batch(options, loaded, world_size)
    return loaded.with_sections(**sections)


def _batch(options: TrainOptions, config: Config, world_size: int) -> Batch:
    """All three sizes: from the command line, else from the file, else a batch of at least 16 that the ranks divide."""
    asked, pp = options.updates, options.placing.pp
    if asked.accumulate is None and pp > 1 and config.batch.accumulation == 1:
        sizes = Batch(accumulation=2 * pp)  # so that most of the time no stage waits for another
    elif asked.batch is None and asked.accumulate is None:
        sizes = config.batch.resolve(world_size)
    else:
        sizes = Batch(accumulation=asked.accumulate or config.batch.accumulation)
    least = sizes.accumulation * world_size
    total = asked.batch or sizes.global_batch_size or -(-DEFAULT_BATCH // least) * least
    if total % least:
        smaller, larger = total // least * least, -(-total // least) * least
        raise ConfigError(
            f"--batch {total} cannot be divided over {world_size} rank(s) x {sizes.accumulation} micro-batch(es): take "
            + (f"{smaller} or {larger}" if smaller else str(larger))
        )
    return Batch(accumulation=sizes.accumulation, micro_batch_size=total // least, global_batch_size=total)


def rate_factor(step: int, *, steps: int, warmup: int, schedule: str) -> float:
    """The learning rate of update `step` (from 0) as a factor of the highest: a linear warm-up, then the schedule.

    >>> [round(rate_factor(step, steps=12, warmup=2, schedule="cosine"), 2) for step in (0, 1, 2, 7, 11)]
    [0.5, 1.0, 1.0, 0.55, 0.12]
    """
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    left = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}[schedule]
    return RATE_FLOOR + (1 - RATE_FLOOR) * left
