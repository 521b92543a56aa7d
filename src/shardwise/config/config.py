"""`Config`: all settings of the engine, validated, with the origin of every value.

To load one, the module recognises the dialect, translates the keys into a draft, derives values, and validates.
"""

import os
import warnings
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr, ValidationError

from shardwise.config import auto
from shardwise.config.dialects import accelerate, deepspeed, native
from shardwise.config.draft import ConfigDraft, Provenance, ValueOrigin, config_error, leaves
from shardwise.config.explain import explain
from shardwise.config.files import YAML_SUFFIXES, read_file, read_text, text_of
from shardwise.config.presets import PRESETS
from shardwise.config.sections import SHARDING_OF_ORDER, Batch, ConfigSections, Placement, Precision, Section
from shardwise.config.shape import NodeShape
from shardwise.config.values import nearest, one_of
from shardwise.errors import ConfigError, ConfigWarning

_FILE_SUFFIXES = (".json", ".hjson", ".jsonc", *YAML_SUFFIXES)
_SHARED_KEYS = ("optimizer", "scheduler")  # native sections have a `name`, DeepSpeed's a `type`
_DEEPEST = 20
_LARGEST = 2**1000


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
    def load(cls, config: "Config | str | os.PathLike[str] | dict[str, Any]") -> "Config":
        """The configuration that `config` names or holds.

        `config` is the name of a preset, the path of a JSON or YAML file, a dict, or a Config. Files and dicts hold
        native keys, DeepSpeed's or Accelerate's; the keys tell which. All errors are `ConfigError`s.
        """
        if isinstance(config, Config):
            return config
        draft = _draft(config)
        _derive_order(draft)
        try:
            sections = ConfigSections(**draft.nested())
        except ValidationError as error:
            raise config_error(error, ConfigSections, draft.source, draft.origins) from None
        loaded = cls(**{name: getattr(sections, name) for name in sections.model_fields_set})
        loaded._provenance = draft.provenance()
        return loaded

    def for_world_size(self, world_size: int) -> "Config":
        """The same configuration with its batch triple resolved for `world_size` ranks.

        K is `batch.accumulation` of the result; before, it may be open. A triple that does not multiply is a
        `ConfigError`.

        >>> config = Config.load({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3})
        >>> config.for_world_size(4).batch.accumulation
        2
        """
        batch = self.batch.resolve(world_size)
        changed = [f"batch.{name}" for name in Batch.model_fields if getattr(batch, name) != getattr(self.batch, name)]
        return self._derived({"batch": batch}, changed, f"W = {world_size}")

    def for_shape(self, shape: NodeShape) -> "Config":
        """The same configuration for ranks on nodes of this shape.

        What is sharded over a node is sharded over all ranks on one node, and replicated on nodes of one rank.
        Gradients that are sharded over a node between micro-batches are sharded over all ranks with one micro-batch.

        >>> Config.load("zero3_hybrid").for_shape(NodeShape(nodes=1, per_node=4)).placement.weights.sharding
        'sharded'
        """
        config = self.for_world_size(shape.world_size)
        resolved = {kind: shape.resolve(own.sharding) for kind, own in self.placement}
        if resolved["grads"] == "node" and config.batch.accumulation == 1:
            resolved["grads"] = "sharded"
        changed = {kind: cut for kind, cut in resolved.items() if cut != getattr(self.placement, kind).sharding}
        if not changed:
            return config
        kinds = {kind: own.model_copy(update={"sharding": resolved[kind]}) for kind, own in self.placement}
        where = f"placement on {shape} ranks"
        try:
            placement = Placement(**kinds)
        except ValidationError as error:
            raise config_error(error, Placement, where, {}) from None
        paths = [f"placement.{kind}.sharding" for kind in changed]
        return config._derived({"placement": placement}, paths, f"{shape} ranks, K = {config.batch.accumulation}")

    def for_dtypes(self, dtypes: Collection[str]) -> "Config":
        """The same configuration for a model whose parameters are of `dtypes` (fp32, bf16, fp16).

        `precision.compute: model` becomes the dtype of such a model. If it has both bf16 and fp32, it stays: then every
        unit keeps its own dtype.

        >>> Config.load({"precision": {"compute": "model"}}).for_dtypes(["bf16"]).precision.compute
        'bf16'
        """
        if self.precision.compute != "model":
            return self
        if len(set(dtypes)) > 1 and "fp16" in dtypes:
            raise ConfigError(
                f"precision.compute is model, and the model's parameters are {', '.join(sorted(set(dtypes)))}: fp16 "
                "needs one loss scale for all of them; set precision.compute: fp16, or convert the model to one dtype"
            )
        if len(set(dtypes)) > 1:
            return self
        compute = next(iter(dtypes), "fp32")
        fields = {**dict(self.precision), "compute": compute}
        if compute != "fp16":
            fields.pop("loss_scale")  # for the case that the model had been fp16
        return self._derived({"precision": Precision(**fields)}, ["precision.compute"], "the model's dtype")

    def _derived(self, sections: dict[str, Section], changed: Iterable[str], reason: str) -> "Config":
        derived = self.model_copy(update=sections)
        given = self._provenance
        origins = {**given.origins, **dict.fromkeys(changed, ValueOrigin("derived", reason))}
        derived._provenance = replace(given, origins=origins)
        return derived

    def with_sections(self, **sections: Section | None) -> "Config":
        """The same configuration with other sections. Keys of a file that are "auto" no longer apply to these."""
        changed = Config(**{name: getattr(self, name) for name in self.model_fields_set} | sections)
        given = self._provenance
        code = (path for path, _, _ in leaves(changed, given=True) if path.partition(".")[0] in sections)
        origins = {**given.origins, **dict.fromkeys(code, ValueOrigin("code"))}
        autos = tuple(each for each in given.autos if each.target.partition(".")[0] not in sections)
        changed._provenance = replace(given, origins=origins, autos=autos)
        return changed

    def for_objects(self, objects: auto.UserObjects, *, warns: bool = True) -> "Config":
        """The same configuration with the values that the user's objects give to keys that the file leaves "auto".

        `warns`: raise a `ConfigWarning` for each key that changes training and about which the objects say nothing.
        """
        given = self._provenance
        if not given.autos:
            return self
        resolved, origins, sentences = auto.resolve(self, given, objects)
        resolved._provenance = replace(given, origins={**given.origins, **origins}, autos=())
        for sentence in sentences if warns else ():
            warnings.warn(f"{given.source}: {sentence}", ConfigWarning, stacklevel=3)
        return resolved

    def origin(self, path: str) -> ValueOrigin:
        """Where the value at a path such as "precision.compute" came from."""
        return self._provenance.origin(path)

    @property
    def idle_keys(self) -> list[str]:
        """The keys of the file that have no effect here; `explain()` says why.

        >>> Config.load({"zero_optimization": {"stage": 2, "overlap_comm": True}}).idle_keys
        ['zero_optimization.overlap_comm']
        """
        return [note.key for note in self._provenance.notes if note.effect.startswith("no effect")]

    def explain(self) -> str:
        """Every effective value, its origin and its effect, as a text of 100 columns."""
        return explain(self, self._provenance)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(self.model_dump_json())


def _draft(config: object) -> ConfigDraft:
    if isinstance(config, str) and config in PRESETS:
        draft = ConfigDraft(f"preset {config}")
        native.apply_preset(config, draft)
        return draft
    if isinstance(config, str) and (text := text_of(config)) is not None:
        return _translated(read_text(text, "JSON text"), "JSON text", Path())
    if isinstance(config, str | os.PathLike):
        path = _existing(config)
        return _translated(read_file(path), str(path), path.parent)
    if isinstance(config, dict):
        return _translated(config, "config", Path())
    raise ConfigError(f"config is {type(config).__name__}, expected a preset's name, a path, a dict or a Config")


def _existing(config: str | os.PathLike[str]) -> Path:
    path = Path(config)
    if os.path.isfile(path):  # unlike Path.is_file, it does not raise for a name that no file can have
        return path
    text = str(config)
    if path.suffix.lower() in _FILE_SUFFIXES or os.sep in text:
        raise ConfigError(f"{text}: no such file")
    raise ConfigError(f"config is {text!r}: neither a file nor a preset ({one_of(PRESETS)}){nearest(text, PRESETS)}")


def _translated(data: dict[str, Any], source: str, folder: Path) -> ConfigDraft:
    draft = ConfigDraft(source)
    _check_shape(data, draft)
    draft.dialect = _dialect(data, source)
    if draft.dialect == "Accelerate":
        accelerate.translate(data, draft, folder)
    elif draft.dialect == "DeepSpeed":
        deepspeed.translate(data, draft)
    else:
        native.translate(data, draft)
    return draft


def _check_shape(value: object, draft: ConfigDraft, path: tuple[str, ...] = ()) -> None:
    """Refuse values that even an error message could not print: recursive sections, integers of thousands of digits."""
    if isinstance(value, dict | list | tuple):
        if len(path) > _DEEPEST:
            raise ConfigError(f"{draft.source}: sections are nested too deeply to be a configuration")
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(value, dict) and not isinstance(key, str):
                raise ConfigError(f"{draft.source}: keys must be strings, found {type(key).__name__}")
            _check_shape(inner, draft, (*path, str(key)[:80]))
    elif isinstance(value, int) and abs(value) > _LARGEST:
        raise draft.error(".".join(path), "...", "this number is too large to mean anything here")


def _dialect(data: dict[str, Any], source: str) -> str:
    """The dialect that the keys belong to. Keys of more than one are an error."""
    found = {
        "native": [key for key in data if key in native.KEYS and _identifies(key, data, "native")],
        "DeepSpeed": [key for key in data if key in deepspeed.KEYS and _identifies(key, data, "DeepSpeed")],
        "Accelerate": [key for key in data if key in accelerate.KEYS],
    }
    present = {dialect: keys for dialect, keys in found.items() if keys}
    if len(present) > 1:
        listed = "; ".join(f"{dialect}: {', '.join(keys[:4])}" for dialect, keys in present.items())
        raise ConfigError(f"{source}: mixes keys of several dialects ({listed}); use those of one")
    if not present and not set(data) <= set(_SHARED_KEYS):
        known = [*native.KEYS, *deepspeed.KEYS, *accelerate.KEYS]
        unknown = ", ".join(f"{key!r}{nearest(key, known)}" for key in list(data)[:4])
        raise ConfigError(f"{source}: no key is known here: {unknown}")
    return next(iter(present), "native")


def _identifies(key: str, data: dict[str, Any], dialect: str) -> bool:
    """Whether a key that several dialects share belongs to `dialect` here."""
    value = data[key]
    if key in _SHARED_KEYS:
        return isinstance(value, dict) and ("name" in value) == (dialect == "native")
    return key not in accelerate.LEGACY_KEYS or isinstance(value, dict)


def _derive_order(draft: ConfigDraft) -> None:
    """Place gradients as a given `gradients.order` needs them, unless the file itself places them."""
    sharding = SHARDING_OF_ORDER.get(str(draft.values.get("gradients.order")))
    origin = draft.origins.get("placement.grads.sharding", ValueOrigin("default"))
    if sharding is None or draft.values.get("placement.grads.sharding") == sharding or origin.kind == "file":
        return
    derived = ValueOrigin("derived", "from gradients.order")
    draft.set("placement.grads.sharding", sharding, derived)
    if sharding != "sharded" and draft.origins.get("placement.grads.tier", origin).kind != "file":
        draft.set("placement.grads.tier", "device", derived)
