"""A configuration in the making: values with their origins, before the models check them.

Every dialect (native, DeepSpeed's, Accelerate's) writes into the same draft, under the native paths, so that
provenance, cross-checks and error messages are written once.
"""

import warnings
from dataclasses import dataclass, field
from typing import Any, Literal

from shardwise.config.values import Where, shown
from shardwise.errors import ConfigWarning

OriginKind = Literal["default", "preset", "file", "auto", "derived", "code"]  # auto: left open in a file


@dataclass(frozen=True)
class Origin:
    """Where a value came from, and under which name its author knows it."""

    kind: OriginKind
    detail: str = ""

    def __str__(self) -> str:
        return f"preset {self.detail}" if self.kind == "preset" else self.kind


@dataclass(frozen=True)
class Note:
    """A key of a file and what it does here, for `Config.explain()`."""

    key: str
    value: str
    effect: str


@dataclass
class Draft:
    """Native paths ("placement.weights.tier") with values and origins, and notes about foreign keys."""

    source: str
    dialect: str = "native"
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)  # a translated key path -> the one in the user's file
    prefix: str = ""  # of translated key paths without an alias

    def set(self, path: str, value: Any, origin: Origin) -> None:
        self.values[path] = value
        self.origins[path] = origin

    def where(self, path: str = "") -> Where:
        """The place that messages about the key `path` name: the one in the user's own file."""
        return Where(self.source, self.aliases.get(path, self.prefix + path if path else ""))

    def note(self, key: str, value: object, effect: str) -> None:
        self.notes.append(Note(self.where(key).path, shown(value), effect))

    def warn(self, key: str, value: object, effect: str) -> None:
        """A note that its author should not have to look for."""
        self.note(key, value, effect)
        warnings.warn(f"{self.source}: {self.where(key).path}: {effect}", ConfigWarning, stacklevel=2)

    def nested(self) -> dict[str, Any]:
        """The values as nested sections, for the models."""
        tree: dict[str, Any] = {}
        for path, value in self.values.items():
            *parents, leaf = path.split(".")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = value
        return tree
