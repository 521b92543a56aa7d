"""What was asked for, checked as far as it can be without a process group, and worked out for a number of ranks.

Whatever is wrong is a ConfigError here, before anything is started. Nothing here needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardwise.config import Config
from shardwise.config.sections import Batch, Gradients, OptimizerSection, Precision
from shardwise.errors import ConfigError
from shardwise.train.corpus import Corpus, open_corpus
from shardwise.train.data import Windows, split
from shardwise.train.options import Options
from shardwise.train.order import Share
from shardwise.train.shape import Shape, shape_of

DEFAULT_BATCH = 16
DEFAULT_CLIP = 1.0
DEFAULT_RATE = 4e-3
"""For the small models that people begin with; larger ones want less."""
WIDE = 256


@dataclass(frozen=True)
class Job:
    """A run for `world_size` ranks."""

    options: Options
    world_size: int
    corpus: Corpus
    shape: Shape
    config: Config

    @property
    def steps(self) -> int:
        return self.options.updates.steps

    @property
    def batch(self) -> int:
        """Sequences per step over all ranks."""
        size = self.config.batch.global_batch_size
        assert size is not None
        return size

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.shape.context

    def share(self, rank: int) -> Share:
        return Share(self.batch, self.config.batch.accumulation, rank, self.world_size)

    @cached_property
    def windows(self) -> tuple[Windows, Windows]:
        """To train on, and to validate with."""
        return split(self.corpus, self.shape.context, self.options.data.held_out)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be gone on with: the model, and the order of its samples."""
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
        """The highest learning rate: as asked, or the smaller the wider the model is."""
        return self.options.updates.lr or DEFAULT_RATE * min(1.0, WIDE / 2 / self.shape.hidden)

    def is_due(self, what: str, step: int) -> bool:
        """Whether to `log`, `eval` or `save` after `step` steps. The last step always is."""
        asked = getattr(self.options.intervals, what)
        least, parts = {"log": (10, 10), "eval": (1000, 5), "save": (1000, 4)}[what]
        every = asked if asked is not None else max(1, min(least, self.steps // parts))
        return step == self.steps or (every > 0 and step % every == 0)


def prepare(options: Options, world_size: int) -> Job:
    """Open the corpus, work out model, batch and configuration."""
    data, model = options.data, options.model
    config = _config(options, world_size)
    corpus = open_corpus(data.paths, data.glob, data.vocab)
    shape = shape_of(model.size, corpus.vocabulary, **model.model_dump(exclude={"size"}))
    job = Job(options, world_size, corpus, shape, config)
    job.windows  # noqa: B018  # too little text is said now
    return job


def _config(options: Options, world_size: int) -> Config:
    placing = options.placing
    loaded = Config.load(placing.config)
    sections = {name: getattr(loaded, name) for name in Config.model_fields}
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
    return Config(**sections)


def _batch(options: Options, config: Config, world_size: int) -> Batch:
    """The whole triple. What the command line leaves open is the file's; what both do is the next multiple of 16."""
    asked = options.updates
    if asked.batch is None and asked.accumulate is None:
        sizes = config.batch.resolve(world_size)
    else:
        sizes = Batch().resolve(world_size)._replace(accumulation=asked.accumulate or config.batch.accumulation)
    least = sizes.accumulation * world_size
    total = asked.batch or sizes.global_size or -(-DEFAULT_BATCH // least) * least
    if total % least:
        smaller, larger = total // least * least, -(-total // least) * least
        raise ConfigError(
            f"--batch {total} cannot be divided over {world_size} rank(s) x {sizes.accumulation} micro-batch(es): take "
            + (f"{smaller} or {larger}" if smaller else str(larger))
        )
    return Batch(accumulation=sizes.accumulation, micro_batch_size=total // least, global_batch_size=total)
