"""Reading and writing files so that an error names the file, what is wrong with it, and what to do about it.

Everything that is read from a file is checked against a schema before it is used: a pydantic model, or a dataclass.
A right checksum only says that a file is as it was written, not that shardwise wrote it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from shardwise.errors import ShardwiseError
from shardwise.sizes import format_bytes

T = TypeVar("T")
_FULL = (errno.ENOSPC, errno.EDQUOT)


def read_json(path: Path, schema: type[T], error: type[ShardwiseError], remedy: str) -> T:
    """The JSON in a file, as `schema` describes it. An `error` that ends with `remedy` if it cannot be read or is
    something else. A file that does not exist is a FileNotFoundError, as always."""
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as problem:
        raise error(f"{path}: cannot be read ({problem}); {remedy}") from None
    return validated(schema, parse_json(text, str(path), error, remedy), str(path), error, remedy)


def parse_json(text: str, source: str, error: type[ShardwiseError], remedy: str) -> Any:
    """The value of a JSON text; an `error` names `source` if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise error(f"{source}: cannot be read as JSON ({problem}); {remedy}") from None


def validated(schema: type[T], value: Any, source: str, error: type[ShardwiseError], remedy: str) -> T:
    """`value`, which was read from `source`, as `schema`; an `error` names the first field that does not fit."""
    try:
        found: T = _adapter(cast(Any, schema)).validate_python(value)
        return found
    except ValidationError as problem:
        first = problem.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        raise error(f"{source} is not valid: {place or 'content'}: {reason}: {remedy}") from None


@cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)


@contextlib.contextmanager
def writing(path: Any, error: type[ShardwiseError], needed_bytes: int | None = None) -> Iterator[None]:
    """Within it, an OSError becomes an `error` that names the file and, on a full disk, what is needed and free.
    `path` is a path or an address."""
    try:
        yield
    except OSError as problem:
        where = problem.filename or path
        reason = problem.strerror or str(problem)
        if problem.errno in _FULL:
            needed = f"{format_bytes(needed_bytes)} are needed and " if needed_bytes is not None else ""
            reason += (
                f" ({needed}{format_bytes(_free_bytes(Path(where)))} are free): free some space, or use another folder"
            )
        raise error(f"{where} cannot be written: {reason}") from problem


def _free_bytes(path: Path) -> int:
    """The free bytes of the file system that `path` is on, or would be."""
    existing = next(each for each in (path, *path.absolute().parents) if each.exists())
    return shutil.disk_usage(existing).free
