"""Decides from the posts of all ranks whether they can continue, and writes the text of the error if not. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shardwise.comm.posts import Post, RankState

_STUCK = (RankState.WAITS, RankState.OUTSIDE, RankState.GONE, RankState.LOST)
_ADVICE = (
    "All ranks must run the same forwards, backwards and steps, and call collectives together (state_dict and gathered "
    "under sharded weights, full_param, save): look for a loop that ends early on one of them, an extra forward, an "
    "exception that was caught, or a call behind `if rank == 0`."
)


class Finding(NamedTuple):
    """Why the ranks cannot continue. A final finding stays true; another counts only if a later reading repeats it."""

    text: str
    is_final: bool


def judge(posts: Sequence[Post]) -> Finding | None:
    """Why the ranks cannot continue, or None if they can."""
    differing = _first_difference(posts)
    if differing is not None:
        channel, number = differing
        return Finding(_message("the ranks disagree on the next operation", posts, channel, number), True)
    for post in posts:
        missing = _missing(posts, post.at) if post.state in (RankState.WAITS, RankState.LOST) and post.at else []
        gone = [rank for rank in missing if posts[rank].state is RankState.GONE]
        if gone:
            assert post.at is not None
            return Finding(_message(f"{_ranks(gone)} left while others wait", posts, *post.at), True)
    return _standstill(posts)


def lost(posts: Sequence[Post], answered: Sequence[bool]) -> str:
    """The text for broken connections. It names the ranks that are gone or do not answer."""
    gone = [rank for rank, post in enumerate(posts) if post.state is RankState.GONE or not answered[rank]]
    at = next((post.at for post in posts if post.state is RankState.LOST and post.at), ("gather", 0))
    died = [rank for rank in gone if posts[rank].state is not RankState.GONE]
    silent = dict.fromkeys(died, "it does not answer: its process has died")
    what = f"{_ranks(gone)} left while others wait" if gone else "connections between the ranks broke"
    return _message(what, posts, *at, silent=silent)


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
    return Finding(_message("every rank waits for another one", posts, *min(waited, key=lambda at: at[1])), False)


def _message(what: str, posts: Sequence[Post], channel: str, number: int, silent: dict[int, str] | None = None) -> str:
    lines: dict[str, list[int]] = {}
    for rank, post in enumerate(posts):
        lines.setdefault((silent or {}).get(rank) or _situation(post, channel, number), []).append(rank)
    table = "\n".join(f"  {_ranks(ranks)}: {line}" for line, ranks in lines.items())
    return f"{what}, so none of them can continue (operation {number} of channel {channel}):\n{table}\n{_ADVICE}"


def _situation(post: Post, channel: str, number: int) -> str:
    if post.state is RankState.GONE:
        return f"gone: {post.detail}"
    text = post.text(channel, number)
    if text is not None:
        return text
    if post.state is RankState.OUTSIDE:
        return f"waits outside the engine, in torch.distributed.{post.detail}"
    if post.at is not None:
        return f"waits for {post.text(*post.at)}"
    return "in its own code"


def _ranks(ranks: Iterable[int]) -> str:
    numbers = list(ranks)
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"
