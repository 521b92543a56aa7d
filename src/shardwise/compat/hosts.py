"""Hosts and slots as DeepSpeed's launcher writes them: hostfiles, and the filters `--include` and `--exclude`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_LINE = re.compile(r"(\S+)\s+slots=(\d+)")


def fetch_hostfile(path: str) -> dict[str, int] | None:
    """The slots of each host in a file; None if there is no such file."""
    return parse_hostfile(Path(path).read_text().splitlines()) if Path(path).is_file() else None


def parse_hostfile(lines: Iterable[str]) -> dict[str, int]:
    """The slots of each host, from lines such as `worker-0 slots=4`."""
    slots: dict[str, int] = {}
    for line in filter(None, (line.partition("#")[0].strip() for line in lines)):
        found = _LINE.fullmatch(line)
        if found is None:
            raise ValueError(f"hostfile: {line!r} is not of the form `HOST slots=N`")
        if found[1] in slots:
            raise ValueError(f"hostfile: {found[1]} stands there twice, keep one line")
        slots[found[1]] = int(found[2])
    if not slots:
        raise ValueError("hostfile: it names no host, write lines of the form `HOST slots=N`")
    return slots


def parse_inclusion_exclusion(pool: Mapping[str, int], inclusion: str, exclusion: str) -> dict[str, list[int]]:
    """The slots that a filter leaves of a pool of hosts, by number."""
    return parse_resource_filter({host: list(range(count)) for host, count in pool.items()}, inclusion, exclusion)


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """The slots that are named, or not named, by a filter such as `worker-0@worker-1:0,2`."""
    if include_str and exclude_str:
        raise ValueError("include_str and exclude_str are mutually exclusive: give one of them")
    named = _named(host_info, include_str or exclude_str)
    if not include_str:
        named = {host: set(slots) - named.get(host, set()) for host, slots in host_info.items()}
    return {host: sorted(named[host]) for host in host_info if named.get(host)}


def _named(host_info: Mapping[str, Sequence[int]], text: str) -> dict[str, set[int]]:
    """The slots that a filter names; all of a host that is named alone."""
    named: dict[str, set[int]] = {}
    for part in filter(None, text.split("@")):
        host, _, numbers = part.partition(":")
        if host not in host_info:
            raise ValueError(f"Hostname '{host}' not found: there are {', '.join(host_info)}")
        slots = {int(number) for number in numbers.split(",")} if numbers else set(host_info[host])
        for slot in sorted(slots - set(host_info[host])):
            raise ValueError(f"No slot '{slot}' specified on host '{host}'")
        named.setdefault(host, set()).update(slots)
    return named
