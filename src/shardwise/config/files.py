"""Configuration files as dicts: JSON, the JSON with comments that DeepSpeed reads (hjson), and YAML.

Plain JSON is tried first; hjson is imported only when that fails. A key that appears twice in one section is an
error in all three formats, because the intended value is unknown.
"""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.checks import read_limited
from shardwise.errors import ConfigError

YAML_SUFFIXES = (".yaml", ".yml")
MOST_BYTES = 4 << 20
"""The largest file that is read. Configurations have a few kB, those of models up to a few hundred."""
MOST_VALUES = 100_000
"""How many values a file may have, counting those that YAML aliases repeat."""


def read_file(path: Path) -> dict[str, Any]:
    """The mapping in a JSON or YAML file, or a `ConfigError` that names the file."""
    try:
        text = read_limited(path, MOST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text, so not a configuration") from None
    return read_text(text, str(path), yaml=path.suffix.lower() in YAML_SUFFIXES)


def text_of(config: str) -> str | None:
    """A configuration that is given as JSON text, plain or in base64, as Accelerate takes it; None for a path."""
    if not config.lstrip().startswith("{"):
        try:
            config = base64.b64decode(config, altchars=b"-_", validate=True).decode()
        except ValueError:
            return None
    return config if config.lstrip().startswith("{") else None


def read_text(text: str, source: str, *, yaml: bool = False) -> dict[str, Any]:
    """The mapping in a text. Error messages name `source` as its file."""
    try:
        content = _yaml(text, source) if yaml else _json(text, source)
    except _DuplicateKey as error:
        raise ConfigError(f"{source}: the key {error.args[0]!r} appears twice in one section; keep one") from None
    except RecursionError:
        raise ConfigError(f"{source}: sections are nested too deeply to be a configuration") from None
    if content is None and yaml:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{source}: holds {type(content).__name__}, expected a mapping of keys to values")
    return content


class _DuplicateKey(Exception):
    pass


def _unique(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    mapping: dict[Any, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise _DuplicateKey(key)
        mapping[key] = value
    return mapping


def _json(text: str, source: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as plain:
        return _hjson(text, source, plain)
    except ValueError as error:  # an integer of thousands of digits
        raise ConfigError(f"{source}: is not valid JSON: {error}") from None


def _hjson(text: str, source: str, plain: json.JSONDecodeError) -> Any:
    failure = f"{source}: is not valid JSON: {plain.msg} at line {plain.lineno}, column {plain.colno}"
    if not text.lstrip().startswith(("{", "#", "/")):
        raise ConfigError(failure)
    try:
        import hjson
    except ImportError:
        raise ConfigError(f"{failure}; for comments and trailing commas, install hjson") from None
    try:
        return hjson.loads(text, object_pairs_hook=_unique)
    except (ValueError, TypeError, IndexError, AttributeError):  # what its parser raises on broken input
        raise ConfigError(failure) from None


def _yaml(text: str, source: str) -> Any:
    import yaml

    class UniqueKeyLoader(yaml.SafeLoader):
        """The safe loader, which also refuses duplicate keys."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.value != "<<"]
            _unique([(key, None) for key in keys])
            return super().construct_mapping(node, deep)

    try:
        loader = UniqueKeyLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        # Before values are made: ten lines of nested aliases stand for more of them than any memory holds.
        if _count(node, {}) > MOST_VALUES:
            raise ConfigError(f"{source}: its aliases repeat more than {MOST_VALUES} values: write out what is meant")
        return loader.construct_document(node)
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ConfigError(f"{source}: is not valid YAML: {' '.join(str(error).split())}") from None


def _count(node: Any, counts: dict[int, int]) -> int:
    """The values below a node of a YAML document, repeated ones each time. A node inside itself has too many."""
    if id(node) not in counts:
        counts[id(node)] = MOST_VALUES + 1  # until its own count is known
        children = node.value if isinstance(node.value, list) else []
        parts = (part for child in children for part in (child if isinstance(child, tuple) else (child,)))
        counts[id(node)] = 1 + sum(_count(part, counts) for part in parts)
    return counts[id(node)]
