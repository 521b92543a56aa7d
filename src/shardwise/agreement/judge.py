"""Decides from the posts of all ranks whether they can continue, and writes the text of the error if not. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shardwise.agreement.posts import FAILED, Answer, Place, Post, RankState, descriptions

_STUCK = (RankState.WAITS, RankState.OUTSIDE, RankState.GONE, RankState.LOST)
_ADVICE = (
    "All ranks must run the same forwards, backwards and steps, and call collectives together (state_dict and gathered "
    "under sharded weights, full_param, save): look for a loop that ends early on one of them, an extra forward, a "
    "batch that is skipped, an exception that was caught, or a call behind `if rank == 0`."
)
_RESTART = "then restart all ranks from the last checkpoint."
_READ_ERROR = f"Read the error of that rank first, {_RESTART}"
_READ_OUTPUT = (
    "Read what that rank wrote last; if the kernel killed it because memory ran out, the system log (`dmesg`) says so; "
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
_UNKNOWN = "an operation that it has not described"
_FIND_STORE = f"End the ranks that are left, find out why that process ended or stands still, {_RESTART}"

_Answers = Sequence[Answer | None]


class Finding(NamedTuple):
    """Why the ranks cannot continue: for the operation `at`. A final finding stays true; another counts only if a
    later reading repeats it. `untold` are the living ranks that issued an operation there and have not described it."""

    text: str
    is_final: bool
    at: Place
    untold: list[int]


def judge(posts: Sequence[Post], answers: _Answers = ()) -> Finding | None:
    """Why the ranks cannot continue, or None if they can. The answers to a roll call may describe operations."""
    differing = _first_difference(posts)
    if differing is not None:
        text = _disagreement("the ranks disagree on the next operation", posts, differing, answers)
        return Finding(text, True, differing, _undescribed(posts, differing, answers))
    for at in dict.fromkeys(post.at for post in posts if post.state in (RankState.WAITS, RankState.LOST)):
        gone = [rank for rank in _missing(posts, at) if posts[rank].state is RankState.GONE] if at else []
        if at and gone:
            has_failed = any(posts[rank].detail.startswith(FAILED) for rank in gone)
            advice = _READ_ERROR if has_failed else _ADVICE
            text = _absence(f"{name_ranks(gone)} left", posts, at, {}, advice, answers)
            return Finding(text, True, at, _undescribed(posts, at, answers))
    return _standstill(posts, answers)


def died(posts: Sequence[Post], words: Mapping[int, str], answers: _Answers = ()) -> str:
    """The text for connections that broke. `words` has the ranks that died or do not answer, and what is known."""
    gone = [rank for rank, post in enumerate(posts) if post.state is RankState.GONE]
    if not words and not gone:
        what = "connections between the ranks broke"
        return _absence(what, posts, _awaited(posts), {}, f"Look for errors of the network, {_RESTART}", answers)
    what = " and ".join(
        f"{name_ranks(ranks)} {verb}" for ranks, verb in ((gone, "left"), (sorted(words), "died")) if ranks
    )
    return _absence(what, posts, _awaited(posts), words, _READ_OUTPUT if words else _READ_ERROR, answers)


def frozen(posts: Sequence[Post], words: Mapping[int, str], silent_s: float, answers: _Answers = ()) -> str:
    """The text for ranks that have not answered a roll call for `silent_s` seconds."""
    what = f"{name_ranks(sorted(words))} did not answer for {silent_s:.0f} s"
    return _absence(what, posts, _awaited(posts), words, _FIND_FROZEN, answers)


def late(posts: Sequence[Post], answers: _Answers, timeout_s: float) -> str:
    """The text for a wait that took longer than the process group allows, although every rank answers."""
    at = _awaited(posts)
    missing = _missing(posts, at) if at else []
    places = {rank: answer.place for rank, answer in enumerate(answers) if answer is not None}
    words = {rank: f"in its own code, {place}" for rank, place in places.items() if rank in missing and place}
    who = name_ranks(missing) if missing else "a rank"
    what = f"{who} did not arrive within the process group's timeout of {timeout_s:g} s"
    return _absence(what, posts, at, words, _RAISE_TIMEOUT, answers)


def without_store(rank: int, operation: str, holder: str, why: str, hosts: str) -> str:
    """The text of a rank that waits and cannot ask the other ranks. `hosts` has the lines of the hosts."""
    lines = f"{hosts}\n" if hosts else ""
    return (
        f"rank {rank} waits for {operation}, and the store through which the ranks exchange their states {why}, so "
        f"none of them can continue: it is held by {holder}, which has died, stands still or cannot be reached.\n"
        f"{lines}{_FIND_STORE}"
    )


def _first_difference(posts: Sequence[Post]) -> Place | None:
    """The channel and the first number with which two ranks issued different operations."""
    for channel in sorted({channel for post in posts for channel in post.issued}):
        spans = {(first, tuple(digests)) for post in posts for first, digests in [post.issued.get(channel, (0, []))]}
        found: dict[int, str] = {}
        differing = [
            number
            for first, digests in spans
            for number, each in enumerate(digests, first)
            if found.setdefault(number, each) != each
        ]
        if differing:
            return channel, min(differing)
    return None


def _undescribed(posts: Sequence[Post], at: Place, answers: _Answers) -> list[int]:
    """The living ranks that issued the operation `at`, whose description no rank has given."""
    known = descriptions(posts, answers)
    return [
        rank
        for rank, post in enumerate(posts)
        if post.state is not RankState.GONE and (each := post.digest(*at)) is not None and each not in known
    ]


def _missing(posts: Sequence[Post], at: Place) -> list[int]:
    """The ranks that have not issued an operation yet."""
    channel, number = at
    return [rank for rank, post in enumerate(posts) if post.count(channel) <= number]


def _standstill(posts: Sequence[Post], answers: _Answers) -> Finding | None:
    """A finding if every rank waits, and none for an operation that all have issued and that may still be running."""
    waited = [post.at for post in posts if post.at is not None]
    if not waited or any(post.state not in _STUCK for post in posts):
        return None
    if not all(_missing(posts, at) for at in set(waited)):
        return None
    at = min(waited, key=lambda at: at[1])
    text = _disagreement("every rank waits for another one", posts, at, answers)
    return Finding(text, False, at, _undescribed(posts, at, answers))


def _awaited(posts: Sequence[Post]) -> Place | None:
    """The operation that a rank which lost its connections waited for, or else any that is waited for."""
    for states in ((RankState.LOST,), (RankState.WAITS,)):
        for post in posts:
            if post.state in states and post.at:
                return post.at
    return None


def _disagreement(what: str, posts: Sequence[Post], at: Place, answers: _Answers) -> str:
    channel, number = at
    place = f"(operation {number} of channel {channel})"
    return f"{what}, so none of them can continue {place}:\n{_table(posts, at, {}, answers)}\n{_ADVICE}"


def _absence(
    what: str, posts: Sequence[Post], at: Place | None, words: Mapping[int, str], advice: str, answers: _Answers
) -> str:
    known = descriptions(posts, answers)
    issued = [post.digest(*at) for post in posts] if at else []
    operation = next((known.get(each, _UNKNOWN) for each in issued if each is not None), "the next operation")
    table = _table(posts, at, words, answers)
    return f"{what} while others wait for {operation}, so none of them can continue:\n{table}\n{advice}"


def _table(posts: Sequence[Post], at: Place | None, words: Mapping[int, str], answers: _Answers) -> str:
    known, lines = descriptions(posts, answers), dict[str, list[int]]()
    for rank, post in enumerate(posts):
        lines.setdefault(words.get(rank) or _situation(post, at, known), []).append(rank)
    return "\n".join(f"  {name_ranks(ranks)}: {line}" for line, ranks in lines.items())


def _situation(post: Post, at: Place | None, known: Mapping[str, str]) -> str:
    if post.state is RankState.GONE:
        return f"gone: {post.detail}"
    issued = post.digest(*at) if at else None
    if issued is not None:
        return known.get(issued, _UNKNOWN)
    if post.state is RankState.OUTSIDE:
        return f"waits outside the engine, in torch.distributed.{post.detail}"
    if post.at is not None:
        return f"waits for {post.waits_for}"
    return "in its own code"


def name_ranks(ranks: Iterable[int]) -> str:
    numbers = list(ranks)
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"
