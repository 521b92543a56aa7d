"""Decides from the posts of all ranks whether they can continue, and writes the text of the error if not. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shardwise.comm.posts import FAILED, Post, RankState

_STUCK = (RankState.WAITS, RankState.OUTSIDE, RankState.GONE, RankState.LOST)
_ADVICE = (
    "All ranks must run the same forwards, backwards and steps, and call collectives together (state_dict and gathered "
    "under sharded weights, full_param, save): look for a loop that ends early on one of them, an extra forward, an "
    "exception that was caught, or a call behind `if rank == 0`."
)
_RESTART = "then restart all ranks from the last checkpoint."
_READ_ERROR = f"Read the error of that rank first, {_RESTART}"
_READ_OUTPUT = (
    "Read what that rank wrote last; if the kernel ended it for want of memory, the system's log (`dmesg`) says so; "
    f"{_RESTART}"
)
_FIND_FROZEN = (
    "A rank that is only slow would have answered. Continue or end the process that stands still, or find out why its "
    f"host cannot be reached; {_RESTART}"
)
_RAISE_TIMEOUT = (
    "The rank lives. If it is to take that long, pass a longer timeout to torch.distributed.init_process_group; "
    "otherwise find out what it waits for (a mount, a download, a lock)."
)
_FIND_STORE = f"End the ranks that are left, find out why that process ended or stands still, {_RESTART}"

Place = tuple[str, int]
"""A channel, and the number of an operation in it."""


class Finding(NamedTuple):
    """Why the ranks cannot continue. A final finding stays true; another counts only if a later reading repeats it."""

    text: str
    is_final: bool


def judge(posts: Sequence[Post]) -> Finding | None:
    """Why the ranks cannot continue, or None if they can."""
    differing = _first_difference(posts)
    if differing is not None:
        return Finding(_disagreement("the ranks disagree on the next operation", posts, differing), True)
    for post in posts:
        missing = _missing(posts, post.at) if post.state in (RankState.WAITS, RankState.LOST) and post.at else []
        gone = [rank for rank in missing if posts[rank].state is RankState.GONE]
        if gone:
            has_failed = any(posts[rank].detail.startswith(FAILED) for rank in gone)
            text = _absence(f"{name_ranks(gone)} left", posts, post.at, {}, _READ_ERROR if has_failed else _ADVICE)
            return Finding(text, True)
    return _standstill(posts)


def died(posts: Sequence[Post], words: Mapping[int, str]) -> str:
    """The text for connections that broke. `words` has the ranks that died or do not answer, and what is known."""
    gone = [rank for rank, post in enumerate(posts) if post.state is RankState.GONE]
    if not words and not gone:
        what = "connections between the ranks broke"
        return _absence(what, posts, _awaited(posts), {}, f"Look for errors of the network, {_RESTART}")
    what = " and ".join(
        f"{name_ranks(ranks)} {verb}" for ranks, verb in ((gone, "left"), (sorted(words), "died")) if ranks
    )
    return _absence(what, posts, _awaited(posts), words, _READ_OUTPUT if words else _READ_ERROR)


def frozen(posts: Sequence[Post], words: Mapping[int, str], silent_s: float) -> str:
    """The text for ranks that have not answered a roll call for `silent_s` seconds."""
    what = f"{name_ranks(sorted(words))} did not answer for {silent_s:.0f} s"
    return _absence(what, posts, _awaited(posts), words, _FIND_FROZEN)


def late(posts: Sequence[Post], places: Mapping[int, str], timeout_s: float) -> str:
    """The text for a wait that took longer than the process group allows, although every rank answers."""
    at = _awaited(posts)
    missing = _missing(posts, at) if at else []
    words = {rank: f"in its own code, {place}" for rank, place in places.items() if rank in missing and place}
    who = name_ranks(missing) if missing else "a rank"
    what = f"{who} did not come within the process group's timeout of {timeout_s:g} s"
    return _absence(what, posts, at, words, _RAISE_TIMEOUT)


def without_store(rank: int, operation: str, holder: str, why: str, hosts: str) -> str:
    """The text of a rank that waits and cannot ask the other ranks. `hosts` has the lines of the hosts."""
    lines = f"{hosts}\n" if hosts else ""
    return (
        f"rank {rank} waits for {operation}, and the store through which the ranks exchange their states {why}, so "
        f"none of them can continue: it is held by {holder}, which has died, stands still or cannot be reached.\n"
        f"{lines}{_FIND_STORE}"
    )


def _first_difference(posts: Sequence[Post]) -> tuple[str, int] | None:
    """The channel and the first number with which two ranks issued different operations."""
    for channel in sorted({channel for post in posts for channel in post.issued}):
        spans = [post.issued[channel] for post in posts if channel in post.issued]
        start = min(first for first, _ in spans)
        stop = max(first + len(texts) for first, texts in spans)
        for number in range(start, stop):
            texts = {_kind(text) for post in posts if (text := post.text(channel, number)) is not None}
            if len(texts) > 1:
                return channel, number
    return None


def _kind(text: str) -> str:
    """An operation without the message of an exception, which may differ from rank to rank (a device, a sample)."""
    return text.partition(": ")[0]


def _missing(posts: Sequence[Post], at: tuple[str, int]) -> list[int]:
    """The ranks that have not issued an operation yet."""
    channel, number = at
    return [rank for rank, post in enumerate(posts) if post.count(channel) <= number]


def _standstill(posts: Sequence[Post]) -> Finding | None:
    """A finding if every rank waits, and none for an operation that all have issued and that may still be running."""
    waited = [post.at for post in posts if post.at is not None]
    if not waited or any(post.state not in _STUCK for post in posts):
        return None
    if not all(_missing(posts, at) for at in waited):
        return None
    return Finding(_disagreement("every rank waits for another one", posts, min(waited, key=lambda at: at[1])), False)


def _awaited(posts: Sequence[Post]) -> Place | None:
    """The operation that a rank which lost its connections waited for, or else any that is waited for."""
    for states in ((RankState.LOST,), (RankState.WAITS,)):
        for post in posts:
            if post.state in states and post.at:
                return post.at
    return None


def _disagreement(what: str, posts: Sequence[Post], at: Place) -> str:
    channel, number = at
    place = f"(operation {number} of channel {channel})"
    return f"{what}, so none of them can continue {place}:\n{_table(posts, at, {})}\n{_ADVICE}"


def _absence(what: str, posts: Sequence[Post], at: Place | None, words: Mapping[int, str], advice: str) -> str:
    operation = next((text for post in posts if at and (text := post.text(*at)) is not None), "the next operation")
    return (
        f"{what} while others wait for {operation}, so none of them can continue:\n{_table(posts, at, words)}\n{advice}"
    )


def _table(posts: Sequence[Post], at: Place | None, words: Mapping[int, str]) -> str:
    lines: dict[str, list[int]] = {}
    for rank, post in enumerate(posts):
        lines.setdefault(words.get(rank) or _situation(post, at), []).append(rank)
    return "\n".join(f"  {name_ranks(ranks)}: {line}" for line, ranks in lines.items())


def _situation(post: Post, at: Place | None) -> str:
    if post.state is RankState.GONE:
        return f"gone: {post.detail}"
    text = post.text(*at) if at else None
    if text is not None:
        return text
    if post.state is RankState.OUTSIDE:
        return f"waits outside the engine, in torch.distributed.{post.detail}"
    if post.at is not None:
        return f"waits for {post.text(*post.at)}"
    return "in its own code"


def name_ranks(ranks: Iterable[int]) -> str:
    numbers = list(ranks)
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"
