"""Values read from files, with one place in them changed."""

import copy
from collections.abc import Iterator
from typing import Any


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a nested one."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(body: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value at a path; without it, if `new` is `...`."""
    body = copy.deepcopy(body)
    if not path:
        return new if new is not ... else {}
    holder = body
    for key in path[:-1]:
        holder = holder[key]
    if new is ...:
        del holder[path[-1]]
    elif new == "renamed" and isinstance(holder, dict):
        holder["other"] = holder.pop(path[-1])
    else:
        holder[path[-1]] = new
    return body
