"""What another library's trainer says about precision and accumulation, in a configuration."""

from __future__ import annotations

from shardwise.config import Config
from shardwise.config.sections import Precision
from shardwise.errors import ConfigError


def with_settings(config: Config, precision: Precision | None, said: str, accumulation: int) -> Config:
    """The configuration with the trainer's precision, if it gives one, and its number of micro-batches.

    `said` is how the user has written the precision. What contradicts the configuration is refused.

    >>> config = with_settings(Config.load("zero2"), Precision(compute="bf16"), "bf16=True", 4)
    >>> config.precision.compute, config.batch.accumulation
    ('bf16', 4)
    """
    if precision is not None:
        compute = config.precision.compute
        if config.origin("precision.compute").kind == "default":
            config = config.with_sections(precision=precision)
        elif compute != precision.compute:
            raise ConfigError(f"{said} and precision.compute: {compute} differ: leave one of them out")
    given = config.batch.accumulation
    if given not in (1, accumulation):
        raise ConfigError(
            f"batch.accumulation is {given}, and the trainer accumulates {accumulation} micro-batches: leave it out of "
            "the configuration, because the trainer counts them"
        )
    return config.with_sections(batch=config.batch.model_copy(update={"accumulation": accumulation}))
