"""Which paths a configuration has: "placement.weights.tier" and so on, read off the models."""

from collections.abc import Iterator, Sequence
from typing import get_args

from pydantic.fields import FieldInfo

from shardwise.config.sections import Section


def subsection(field: FieldInfo) -> type[Section] | None:
    """The section that a field holds (also an optional one), or None for a plain value."""
    for candidate in (field.annotation, *get_args(field.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def section_class(root: type[Section], path: Sequence[int | str]) -> type[Section] | None:
    """The model at `path` below `root`."""
    current: type[Section] | None = root
    for part in path:
        field = current.model_fields.get(str(part)) if current else None
        current = subsection(field) if field else None
    return current


def leaves(section: type[Section], prefix: str = "") -> Iterator[str]:
    """All paths of plain values below `section`, in the order of their declaration."""
    for name, field in section.model_fields.items():
        inner = subsection(field)
        if inner is None:
            yield prefix + name
        else:
            yield from leaves(inner, f"{prefix}{name}.")
