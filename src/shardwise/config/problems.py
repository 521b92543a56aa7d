"""From a pydantic error to a `ConfigError` that names file, key path, value seen and what is allowed."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from shardwise.config.draft import Origin
from shardwise.config.values import nearest, shown
from shardwise.errors import ConfigError


def config_error(error: ValidationError, source: str, origins: Mapping[str, Origin]) -> ConfigError:
    """All problems of `error`, one a line, under the key paths of the user's own file."""
    problems = error.errors(include_url=False)
    return ConfigError("\n".join(f"{source}: {_line(problem, origins, error.title)}" for problem in problems))


def _line(problem: Mapping[str, Any], origins: Mapping[str, Origin], title: str) -> str:
    path = ".".join(str(part) for part in problem["loc"])
    message = _message(problem, title)
    keys = [origin.detail for name, origin in origins.items() if _about(name, path) and origin.kind == "file"]
    if problem["type"] == "value_error" and not isinstance(problem["input"], str | int | float):
        seen = f" ({', '.join(keys)})" if keys else ""
        return f"{path}: {message}{seen}" if path else f"{message}{seen}"
    return f"{keys[0] if keys else path} = {shown(problem['input'])}: {message}"


def _about(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.") if path else False


def _message(problem: Mapping[str, Any], title: str) -> str:
    message: str = problem["msg"]
    if problem["type"] == "extra_forbidden":
        return f"unknown key{nearest(str(problem['loc'][-1]), _fields_beside(problem['loc']))}"
    if problem["type"] == "literal_error":
        return f"expected {problem['ctx']['expected']}"
    return message.removeprefix("Value error, ")


def _fields_beside(loc: tuple[int | str, ...]) -> list[str]:
    """The valid names at the place of an unknown key."""
    from shardwise.config.config import Config
    from shardwise.config.paths import section_class

    section = section_class(Config, loc[:-1])
    return list(section.model_fields) if section else []
