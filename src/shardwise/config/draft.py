"""A configuration before it is validated: native key paths with values, and where each value came from.

Every dialect (native, DeepSpeed's, Accelerate's) writes into one `ConfigDraft` under native paths such as
"placement.weights.tier". Origins, cross-checks and error messages are therefore written once.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from shardwise.config.sections import Placement, Section
from shardwise.config.values import nearest, shown
from shardwise.errors import ConfigError, ConfigWarning

T = TypeVar("T")
OriginKind = Literal["default", "preset", "file", "auto", "derived", "code"]  # auto: the file says "auto"


@dataclass(frozen=True)
class ValueOrigin:
    """Where a value came from. `detail` names it for the user: the preset, or the key in the user's file."""

    kind: OriginKind
    detail: str = ""

    def __str__(self) -> str:
        return f"preset {self.detail}" if self.kind == "preset" else self.kind


class KeyNote(NamedTuple):
    """A key of a DeepSpeed or Accelerate file and its effect, for `Config.explain()`."""

    key: str
    value: str
    effect: str


class AutoKey(NamedTuple):
    """A key of the user's file that says "auto", and the native path that it would set.

    `choices` is for a precision: the values, by native path, that each dtype brings, or why the file cannot have it.
    """

    key: str
    target: str
    choices: Mapping[str, Mapping[str, Any] | ConfigError] = {}


@dataclass(frozen=True)
class Provenance:
    """What a configuration was read from: its source, the origin of each value by path, notes on the file's keys, and
    those of its keys that are "auto"."""

    source: str
    origins: Mapping[str, ValueOrigin] = field(default_factory=dict)
    notes: tuple[KeyNote, ...] = ()
    autos: tuple[AutoKey, ...] = ()

    def origin(self, path: str) -> ValueOrigin:
        return self.origins.get(path, ValueOrigin("default"))

    def has_any(self, prefix: str) -> bool:
        """Whether any value below the section `prefix` was given."""
        return any(path.startswith(f"{prefix}.") for path in self.origins)


@dataclass
class ConfigDraft:
    """Values and origins by native path, and notes on the keys of DeepSpeed and Accelerate files."""

    source: str
    dialect: str = "native"
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, ValueOrigin] = field(default_factory=dict)
    notes: list[KeyNote] = field(default_factory=list)
    autos: list[AutoKey] = field(default_factory=list)
    warns: bool = True
    aliases: dict[str, str] = field(default_factory=dict)  # a translated key path -> the path in the user's file
    prefix: str = ""  # put before translated key paths that have no alias

    def set(self, path: str, value: Any, origin: ValueOrigin) -> None:
        self.values[path] = value
        self.origins[path] = origin

    def set_placement(self, row: Placement, origin: ValueOrigin) -> None:
        """Set a whole row of the placement table."""
        for kind, own in row:
            self.set(f"placement.{kind}.sharding", own.sharding, origin)
            self.set(f"placement.{kind}.tier", own.tier, origin)

    def set_from(self, key: str, path: str, value: Any) -> None:
        """Set a native path to the value that a key of the file gives it."""
        self.set(path, value, ValueOrigin("file", self.own_path(key)))

    def own_path(self, key: str) -> str:
        """The path of a key in the user's own file, for messages."""
        return self.aliases.get(key, self.prefix + key)

    def error(self, key: str, value: object, message: str) -> ConfigError:
        """The error for `value` at `key`: file, key path, value seen, what is allowed."""
        return ConfigError(f"{self.source}: {self.own_path(key)} = {shown(value)}: {message}")

    def read(self, key: str, reader: Callable[[Any], T], value: object) -> T:
        """`value` as `reader` reads it; its ValueError becomes the error of `key`."""
        try:
            return reader(value)
        except (ValueError, TypeError) as error:
            raise self.error(key, value, str(error)) from None

    def section(self, key: str, value: object) -> dict[str, Any]:
        """`value` as a section: a mapping, or null for an empty one."""
        if value is None:
            return {}
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise self.error(key, value, "expected a section (a mapping of keys to values)")
        return value

    def note(self, key: str, value: object, effect: str) -> None:
        self.notes.append(KeyNote(self.own_path(key), shown(value), effect))

    def warn(self, key: str, value: object, effect: str) -> None:
        """Note the key and raise a `ConfigWarning` about it."""
        self.note(key, value, effect)
        if self.warns:
            warnings.warn(f"{self.source}: {self.own_path(key)}: {effect}", ConfigWarning, stacklevel=2)

    def nested(self) -> dict[str, Any]:
        """The values as nested sections."""
        tree: dict[str, Any] = {}
        for path, value in self.values.items():
            *parents, leaf = path.split(".")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = value
        return tree

    def provenance(self) -> Provenance:
        source = self.source if self.dialect == "native" else f"{self.source} ({self.dialect})"
        return Provenance(source, dict(self.origins), tuple(self.notes), tuple(self.autos))


def subsection(info: FieldInfo) -> type[Section] | None:
    """The section class of a field, also of an optional one; None for a plain value."""
    for candidate in (info.annotation, *get_args(info.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def leaves(section: Section, *, given: bool = False, prefix: str = "") -> Iterator[tuple[str, Any, FieldInfo]]:
    """Path, value and field of each plain value below `section`: of all of them, or of those given explicitly."""
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if given and name not in section.model_fields_set:
            continue
        if isinstance(value, Section):
            yield from leaves(value, given=given, prefix=f"{prefix}{name}.")
        else:
            yield prefix + name, value, info


def config_error(
    error: ValidationError, root: type[Section], source: str, origins: Mapping[str, ValueOrigin]
) -> ConfigError:
    """A `ConfigError` with one line per problem: source, key path in the user's file, value seen, what is allowed."""
    problems = error.errors(include_url=False)
    return ConfigError("\n".join(f"{source}: {_problem_line(problem, root, origins)}" for problem in problems))


def _problem_line(problem: Mapping[str, Any], root: type[Section], origins: Mapping[str, ValueOrigin]) -> str:
    path = ".".join(str(part) for part in problem["loc"])
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "literal_error":
        message = f"expected {problem['ctx']['expected']}"
    elif problem["type"] == "extra_forbidden":
        *parents, name = problem["loc"]
        section = root
        for parent in parents:
            section = subsection(section.model_fields[parent]) or section
        message = f"unknown key{nearest(name, section.model_fields)}"
    given = (name for name, origin in origins.items() if origin.kind == "file")
    keys = [origins[name].detail for name in given if f"{name}.".startswith(f"{path}.")]
    if problem["type"] == "value_error" and not isinstance(problem["input"], str | int | float):
        seen = f" ({', '.join(keys)})" if keys else ""
        return f"{path}: {message}{seen}" if path else f"{message}{seen}"
    return f"{keys[0] if keys else path} = {shown(problem['input'])}: {message}"
