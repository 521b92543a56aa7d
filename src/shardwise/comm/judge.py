"""Pure: from the posts of all ranks, whether they can go on, and the text of the error if not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shardwise.comm.posts import Post, State

_STUCK = (State.WAITS, State.OUTSIDE, State.GONE, State.LOST)
_ADVICE = (
    "All ranks must run the same forwards, backwards and steps, and call together what is a collective (state_dict and "
    "gathered under sharded weights, full_param, save): look for a loop that ends early on one of them, an extra "
    "forward, an exception that was caught, or a call behind `if rank == 0`."
)


class Finding(NamedTuple):
    """Why the ranks cannot go on. What is final stays true; the rest holds if it is still so a while later."""

    text: str
    is_final: bool


def judge(posts: Sequence[Post]) -> Finding | None:
    """What stands in the way of all ranks, if anything does."""
    differing = _first_difference(posts)
    if differing is not None:
        stream, number = differing
        return Finding(_message("the ranks disagree on what comes next", posts, stream, number), True)
    for post in posts:
        missing = _missing(posts, post.at) if post.state in (State.WAITS, State.LOST) and post.at else []
        gone = [rank for rank in missing if posts[rank].state is State.GONE]
        if gone:
            assert post.at is not None
            return Finding(_message(f"{_ranks(gone)} left while others wait", posts, *post.at), True)
    return _standstill(posts)


def lost(posts: Sequence[Post], answered: Sequence[bool]) -> str:
    """The text where connections broke: those who are gone or do not answer are named."""
    gone = [rank for rank, post in enumerate(posts) if post.state is State.GONE or not answered[rank]]
    at = next((post.at for post in posts if post.state is State.LOST and post.at), ("gather", 0))
    silent = {rank: "it does not answer: its process has died" for rank in gone if posts[rank].state is not State.GONE}
    what = f"{_ranks(gone)} left while others wait" if gone else "connections between the ranks broke"
    return _message(what, posts, *at, silent=silent)


def _first_difference(posts: Sequence[Post]) -> tuple[str, int] | None:
    """The first number under which two ranks issued different operations."""
    found = []
    for stream in sorted({stream for post in posts for stream in post.issued}):
        spans = [post.issued[stream] for post in posts if stream in post.issued]
        start = min(first for first, _ in spans)
        stop = max(first + len(texts) for first, texts in spans)
        for number in range(start, stop):
            texts = {_kind(text) for post in posts if (text := post.text(stream, number)) is not None}
            if len(texts) > 1:
                found.append((stream, number))
                break
    return found[0] if found else None


def _kind(text: str) -> str:
    """What an operation is: the words of an exception (a device, a sample) may differ from rank to rank."""
    return text.partition(": ")[0]


def _missing(posts: Sequence[Post], at: tuple[str, int]) -> list[int]:
    """The ranks that have not issued an operation yet."""
    stream, number = at
    return [rank for rank, post in enumerate(posts) if post.count(stream) <= number]


def _standstill(posts: Sequence[Post]) -> Finding | None:
    """Everyone waits, and nobody for something that all have issued and that may thus be on its way."""
    waited = [post.at for post in posts if post.at is not None]
    if not waited or any(post.state not in _STUCK for post in posts):
        return None
    if not all(_missing(posts, at) for at in waited):
        return None
    return Finding(_message("every rank waits for another one", posts, *min(waited, key=lambda at: at[1])), False)


def _message(what: str, posts: Sequence[Post], stream: str, number: int, silent: dict[int, str] | None = None) -> str:
    lines: dict[str, list[int]] = {}
    for rank, post in enumerate(posts):
        lines.setdefault((silent or {}).get(rank) or _situation(post, stream, number), []).append(rank)
    table = "\n".join(f"  {_ranks(ranks)}: {line}" for line, ranks in lines.items())
    return f"{what}, so none of them can go on (operation {number} among those that {stream}):\n{table}\n{_ADVICE}"


def _situation(post: Post, stream: str, number: int) -> str:
    if post.state is State.GONE:
        return f"gone: {post.detail}"
    text = post.text(stream, number)
    if text is not None:
        return text
    if post.state is State.OUTSIDE:
        return f"waits outside the engine, in torch.distributed.{post.detail}"
    if post.at is not None:
        return f"waits for {post.text(*post.at)}"
    return "in its own code"


def _ranks(ranks: Iterable[int]) -> str:
    numbers = list(ranks)
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"
