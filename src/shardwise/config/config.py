"""`Config`: all settings of the engine, validated, with the origin of every value."""

from os import PathLike
from typing import Any

from pydantic import PrivateAttr, ValidationError

from shardwise.config.draft import Provenance, ValueOrigin, config_error, leaves
from shardwise.config.explain import explain
from shardwise.config.load import load
from shardwise.config.sections import Batch, ConfigSections


class Config(ConfigSections):
    """A whole configuration. Build one from sections, or read a preset, a dict or a file with `Config.load`.

    >>> Config.load("zero3").placement.weights.sharding
    'sharded'
    """

    # A private attribute, so not part of equality or hash: equal values are an equal configuration from any source.
    _provenance: Provenance = PrivateAttr()

    def __init__(self, **sections: Any) -> None:
        try:
            super().__init__(**sections)
        except ValidationError as error:
            raise config_error(error, type(self), "Config", {}) from None
        given = (path for path, _, _ in leaves(self, given=True))
        self._provenance = Provenance("Config(...)", dict.fromkeys(given, ValueOrigin("code")))

    @classmethod
    def load(cls, config: "Config | str | PathLike[str] | dict[str, Any]") -> "Config":
        """The configuration that `config` names or holds.

        `config` is the name of a preset, the path of a JSON or YAML file, a dict, or a Config. Files and dicts hold
        native keys, DeepSpeed's or Accelerate's; the keys tell which. All errors are `ConfigError`s.
        """
        if isinstance(config, Config):
            return config
        sections, provenance = load(config)
        loaded = cls(**{name: getattr(sections, name) for name in sections.model_fields_set})
        loaded._provenance = provenance
        return loaded

    def for_world_size(self, world_size: int) -> "Config":
        """The same configuration with its batch triple resolved for `world_size` ranks.

        K is `batch.accumulation` of the result; before, it may be open. A triple that does not multiply is a
        `ConfigError`.

        >>> config = Config.load({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3})
        >>> config.for_world_size(4).batch.accumulation
        2
        """
        micro, accumulation, total = self.batch.resolve(world_size)
        batch = Batch(accumulation=accumulation, micro_batch_size=micro, global_batch_size=total)
        resolved = self.model_copy(update={"batch": batch})
        changed = [f"batch.{name}" for name in Batch.model_fields if getattr(batch, name) != getattr(self.batch, name)]
        given = self._provenance
        origins = {**given.origins, **dict.fromkeys(changed, ValueOrigin("derived", f"W = {world_size}"))}
        resolved._provenance = Provenance(given.source, origins, given.notes)
        return resolved

    def origin(self, path: str) -> ValueOrigin:
        """Where the value at a path such as "precision.compute" came from."""
        return self._provenance.origin(path)

    def explain(self) -> str:
        """Every effective value, its origin and its effect, as a text of 100 columns."""
        return explain(self, self._provenance)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(self.model_dump_json())
