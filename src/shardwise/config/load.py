"""`Config.load`: find out what was given, let its dialect fill a draft, derive what follows, check it all."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shardwise.config import accelerate, deepspeed, native
from shardwise.config.config import Config
from shardwise.config.draft import Draft, Origin
from shardwise.config.files import YAML_SUFFIXES, read_file, read_text
from shardwise.config.presets import PRESETS
from shardwise.config.problems import config_error
from shardwise.config.values import Where, nearest, one_of
from shardwise.errors import ConfigError

_FILE_SUFFIXES = (".json", ".hjson", ".jsonc", *YAML_SUFFIXES)
_EITHER = ("optimizer", "scheduler")  # native sections and DeepSpeed's share these names; `type` or `name` tells them

_DEEPEST = 20
_LARGEST = 2**1000


def load(config: object) -> Config:
    """See `Config.load`."""
    if isinstance(config, Config):
        return config
    if isinstance(config, str) and config in PRESETS:
        return _from_preset(config)
    if isinstance(config, str) and config.lstrip().startswith("{"):
        return _from_mapping(read_text(config, "JSON text"), "JSON text", Path())
    if isinstance(config, str | os.PathLike):
        path = _existing(config)
        return _from_mapping(read_file(path), str(path), path.parent)
    if isinstance(config, dict):
        return _from_mapping(config, "config", Path())
    raise ConfigError(f"config is {type(config).__name__}, expected a preset's name, a path, a dict or a Config")


def _existing(config: str | os.PathLike[str]) -> Path:
    path = Path(config)
    if os.path.isfile(path):  # unlike Path.is_file, no exception for a name that no file can have
        return path
    text = str(config)
    if path.suffix.lower() in _FILE_SUFFIXES or os.sep in text:
        raise ConfigError(f"{text}: no such file")
    raise ConfigError(f"config is {text!r}: neither a file nor a preset ({one_of(PRESETS)}){nearest(text, PRESETS)}")


def _from_preset(name: str) -> Config:
    draft = Draft(f"preset {name}")
    native.apply_preset(name, draft, draft.where())
    return _finish(draft)


def _from_mapping(data: dict[str, Any], source: str, folder: Path) -> Config:
    draft = Draft(source)
    _check_shape(data, draft.where(), depth=0)
    draft.dialect = _dialect(data, source)
    if draft.dialect == "Accelerate":
        accelerate.translate(data, draft, folder)
    elif draft.dialect == "DeepSpeed":
        deepspeed.translate(data, draft)
    else:
        native.translate(data, draft)
    return _finish(draft)


def _check_shape(value: object, where: Where, depth: int) -> None:
    """Refuse what no reader could even print: sections nested in themselves, integers of thousands of digits."""
    if isinstance(value, dict | list | tuple):
        if depth > _DEEPEST:
            raise ConfigError(f"{where.source}: sections are nested too deeply to be a configuration")
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(value, dict) and not isinstance(key, str):
                raise ConfigError(f"{where.source}: keys must be texts, found {type(key).__name__}")
            _check_shape(inner, where.at(str(key)[:80]), depth + 1)
    elif isinstance(value, int) and abs(value) > _LARGEST:
        raise where.error("...", "this number is too large to mean anything here")


def _dialect(data: dict[str, Any], source: str) -> str:
    """Which of the three dialects the keys belong to. More than one is a mixture, and an error."""
    found = {
        "native": [key for key in data if key in native.KEYS and _speaks(key, data, "native")],
        "DeepSpeed": [key for key in data if deepspeed.is_key(key) and _speaks(key, data, "DeepSpeed")],
        "Accelerate": [key for key in data if key in accelerate.KEYS],
    }
    spoken = {dialect: keys for dialect, keys in found.items() if keys}
    if len(spoken) > 1:
        listed = "; ".join(f"{dialect}: {', '.join(keys[:4])}" for dialect, keys in spoken.items())
        raise ConfigError(f"{source}: mixes keys of several dialects ({listed}); use those of one")
    if not spoken and not set(data) <= set(_EITHER):
        raise ConfigError(f"{source}: no key is known here: {_with_nearest(data)}")
    return next(iter(spoken), "native")


def _speaks(key: str, data: dict[str, Any], dialect: str) -> bool:
    """Whether a key that more than one dialect has tells that this one is spoken."""
    value = data[key]
    if key in _EITHER:
        return isinstance(value, dict) and ("name" in value) == (dialect == "native")
    return key not in accelerate.LEGACY_KEYS or isinstance(value, dict)


def _with_nearest(data: Iterable[str]) -> str:
    known = [*native.KEYS, *deepspeed.KEYS, *accelerate.KEYS]
    return ", ".join(f"{key!r}{nearest(key, known)}" for key in list(data)[:4])


def _finish(draft: Draft) -> Config:
    _derive_order(draft)
    try:
        config = Config.__new__(Config)
        config.__pydantic_validator__.validate_python(draft.nested(), self_instance=config)
    except ValidationError as error:
        raise config_error(error, draft.source, draft.origins) from None
    config._origins = dict(draft.origins)
    config._notes = tuple(draft.notes)
    config._source = f"{draft.source} ({draft.dialect})" if draft.dialect != "native" else draft.source
    return config


def _derive_order(draft: Draft) -> None:
    """A given order of accumulation moves the gradients of a preset; an explicit placement must agree with it."""
    sharding = {"local": "replicated", "sharded": "sharded"}.get(str(draft.values.get("gradients.order")))
    origin = draft.origins.get("placement.grads.sharding", Origin("default"))
    if sharding is None or draft.values.get("placement.grads.sharding") == sharding or origin.kind == "file":
        return
    derived = Origin("derived", "from gradients.order")
    draft.set("placement.grads.sharding", sharding, derived)
    if sharding == "replicated" and draft.origins.get("placement.grads.tier", origin).kind != "file":
        draft.set("placement.grads.tier", "device", derived)
