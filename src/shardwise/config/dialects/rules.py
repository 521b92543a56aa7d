"""Rules of the keys that DeepSpeed and Accelerate define, and a section of a file that is read by such rules.

A key sets a native path, or has a reason why it has no effect. Features outside ZeRO are refused by name when they are
switched on. Every key is noted for `explain()`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from shardwise.config.draft import AutoKey, ConfigDraft, ValueOrigin
from shardwise.config.values import any_value, is_open, nearest, one_of
from shardwise.errors import ConfigError

T = TypeVar("T")


class KeyRule(NamedTuple):
    """How one key is read, its effect, and the native path that it sets, if any."""

    read: Callable[[Any], Any]
    effect: str
    target: str | None = None
    in_elements: bool = False  # DeepSpeed counts buckets in elements, shardwise in bytes
    keep_larger: bool = False  # offload_param and offload_optimizer may both set it
    warns: bool = False  # warn of the effect when the key is switched on


class Refused(NamedTuple):
    """The rule of a feature outside ZeRO: an error when it is switched on."""

    feature: str


class Alias(NamedTuple):
    """The rule of another name of a key. A deprecated one warns, as in DeepSpeed."""

    name: str
    deprecated: bool = False


BY_CODE = KeyRule(any_value, "the module of the dialect reads this key itself")
ANY_OTHER = "*"  # the key of the rule for keys without a rule of their own

Rules = dict[str, KeyRule | Refused | Alias]


def without_effect(rules: Rules, reason: str) -> Rules:
    """The same rules for keys that set nothing. Their values are still checked."""
    plain = {key: rule for key, rule in rules.items() if isinstance(rule, KeyRule) and rule is not BY_CODE}
    return rules | {key: rule._replace(effect=f"no effect: {reason}", target=None) for key, rule in plain.items()}


@dataclass(frozen=True)
class FileSection:
    """A section of the user's file. `path` is empty for the top level."""

    draft: ConfigDraft
    path: str
    data: dict[str, Any]

    def inner(self, key: str) -> "FileSection":
        """The section at `key`, empty where it is absent."""
        return FileSection(self.draft, self.at(key), self.draft.section(self.at(key), self.data.get(key)))

    def at(self, key: str) -> str:
        """The path of a key of this section."""
        return f"{self.path}.{key}" if self.path else key

    def read(self, key: str, reader: Callable[[Any], T]) -> T:
        return self.draft.read(self.at(key), reader, self.data.get(key))

    def is_open(self, key: str) -> bool:
        """Whether the file leaves `key` open: absent, null or auto."""
        return is_open(self.data.get(key))

    def set(self, key: str, target: str, value: object) -> None:
        self.draft.set_from(self.at(key), target, value)

    def note(self, key: str, effect: str) -> None:
        self.draft.note(self.at(key), self.data.get(key), effect)

    def warn(self, key: str, effect: str) -> None:
        self.draft.warn(self.at(key), self.data.get(key), effect)

    def error(self, key: str, message: str) -> ConfigError:
        return self.draft.error(self.at(key), self.data.get(key), message)

    def canonical(self, rules: Rules) -> "FileSection":
        """The section under current key names. Two names of one key with different values are an error."""
        result: dict[str, Any] = {}
        for key, value in self.data.items():
            rule = rules.get(key)
            name = rule.name if isinstance(rule, Alias) else key
            if isinstance(rule, Alias) and rule.deprecated:
                self.warn(key, f"is deprecated, use {name}")
            if name in result and result[name] != value:
                raise self.error(key, f"contradicts {name} = {result[name]!r}; keep one of the two")
            if name != key:
                self.draft.aliases.setdefault(self.at(name), self.draft.own_path(self.at(key)))
            result[name] = value
        return FileSection(self.draft, self.path, result)

    def refuse(self, rules: Rules) -> None:
        """Raise for the first feature outside ZeRO that is switched on."""
        for key, value in self.data.items():
            rule = rules.get(key)
            if isinstance(rule, Refused) and switched_on(value):
                message = f"asks for {rule.feature}, which shardwise does not do; remove it or switch it off"
                raise self.error(key, message)

    def apply(self, rules: Rules, element_bytes: int = 1) -> None:
        """Refuse features outside ZeRO, then read each key by its rule."""
        self.refuse(rules)
        for key in self.data:
            rule = rules.get(key, rules.get(ANY_OTHER))
            if rule is None:
                few = f", expected {one_of(rules)}" if len(rules) < 4 else ""
                raise self.error(key, f"unknown key{few}{nearest(key, rules)}")
            if isinstance(rule, Refused):
                self.note(key, f"off ({rule.feature} is not supported)")
            elif isinstance(rule, KeyRule) and rule is not BY_CODE:
                self._apply_rule(key, rule, element_bytes)

    def _apply_rule(self, key: str, rule: KeyRule, element_bytes: int) -> None:
        if rule.warns:
            return self.warn(key, rule.effect) if switched_on(self.data[key]) else self.note(key, "off")
        if self.is_open(key) and rule.read is not any_value:
            return self.leave_open(key, rule.target)
        result = self.read(key, rule.read)
        if rule.target:
            result = result * element_bytes if rule.in_elements and result is not None else result
            if rule.keep_larger and rule.target in self.draft.values:
                result = max(result, self.draft.values[rule.target])
            self.set(key, rule.target, result)
        return self.note(key, f"{rule.target}: {rule.effect}" if rule.target else rule.effect)

    def leave_open(self, key: str, target: str | None, default: str = "") -> None:
        """Note that `key` is null or auto, so that the default of `target` applies."""
        is_auto = self.data[key] == "auto"
        self.note(key, f"the library's own default{default}" if is_auto else "as if it were absent")
        if target and is_auto:
            path = self.draft.own_path(self.at(key))
            self.draft.origins.setdefault(target, ValueOrigin("auto", f"auto {path}"))
            self.draft.autos.append(AutoKey(path, target))


def switched_on(value: object, depth: int = 0) -> bool:
    """Whether a block switches its feature on: by `enabled` where present, else by any value that is not off."""
    if isinstance(value, dict):
        flags = _enabled_flags(value, depth)
        return any(flags) if flags else depth < 8 and any(switched_on(child, depth + 1) for child in value.values())
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value > 1 or (0 < value < 1) or math.isnan(value)
    if isinstance(value, str):
        return value.strip().lower() not in ("", "auto", "none", "false", "no", "0", "1", "-1")
    return bool(value)


def _enabled_flags(block: dict[Any, Any], depth: int) -> list[bool]:
    if "enabled" in block and not switched_on(block["enabled"], depth + 1):
        return [False]
    own = [True] if "enabled" in block else []
    children = [child for child in block.values() if isinstance(child, dict)] if depth < 8 else []
    return own + [found for child in children for found in _enabled_flags(child, depth + 1)]
