"""Readers of single values in the forms that files use: "1e-8" (a string in YAML 1.1), "true", 5e8 for an integer.

A reader raises ValueError with what is allowed; `ConfigDraft.read` adds the file, the key path and the value seen.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shardwise.sizes import whole


def shown(value: object) -> str:
    """`value` as a file would spell it, at most 80 characters."""
    text = "null" if value is None else repr(value)
    if isinstance(value, bool):
        text = text.lower()
    elif isinstance(value, float) and value == float(f"{value:g}"):
        text = f"{value:g}"
    return text if len(text) <= 80 else text[:77] + "..."


def real(value: object) -> float:
    """A finite number.

    >>> real("1e-8")
    1e-08
    """
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise ValueError("expected a finite number")


def at_least_zero(value: object) -> float:
    number = real(value)
    if number < 0:
        raise ValueError("expected a number >= 0")
    return number


def positive(value: object) -> int:
    number = whole(value)
    if number < 1:
        raise ValueError("expected a whole number >= 1")
    return number


def flag(value: object) -> bool:
    """true or false, also spelled as a string or as 0 and 1."""
    names = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}
    answer = names.get(str(value).strip().lower()) if isinstance(value, bool | int | str) else None
    if answer is None:
        raise ValueError("expected true or false")
    return answer


def text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("expected a text")
    return value


def any_value(value: object) -> object:
    return value


def bound(value: object) -> int | None:
    """A whole number, or None for infinity (no bound)."""
    if value == math.inf or (isinstance(value, str) and value.lower() in ("inf", "infinity")):
        return None
    return whole(value)


def choice(*names: str) -> Callable[[object], str]:
    """A reader that accepts one of `names`, in any case."""

    def read(value: object) -> str:
        found = value.strip().lower() if isinstance(value, str) else None
        if found not in names:
            raise ValueError(f"expected {one_of(names)}{nearest(str(value), names)}")
        return found

    return read


def is_open(value: object) -> bool:
    """Whether a value is left open: auto or null."""
    return value is None or value == "auto"


def read_params(params: Mapping[str, Any], readers: Mapping[str, Callable[[Any], Any]], name: str) -> dict[str, Any]:
    """The parameters of the optimizer or schedule `name` in their types, without those that are left open."""
    result = {}
    for key, value in params.items():
        if is_open(value):
            continue
        if key not in readers:
            raise ValueError(f"params.{key}: unknown key of {name}{nearest(key, readers)}")
        try:
            result[key] = readers[key](value)
        except ValueError as error:
            raise ValueError(f"params.{key} = {value!r}: {error}") from None
    return result


def one_of(names: Iterable[object]) -> str:
    """ "a, b or c"."""
    *others, last = [str(name) for name in names]
    return f"{', '.join(others)} or {last}" if others else last


def nearest(name: str, names: Iterable[str]) -> str:
    """ "; did you mean ...?" for the closest of `names`, or nothing."""
    from difflib import get_close_matches  # needed for errors only

    known = {known.lower(): known for known in names}
    found = get_close_matches(name.strip().lower(), known, n=1, cutoff=0.6)
    return f"; did you mean {known[found[0]]!r}?" if found else ""
