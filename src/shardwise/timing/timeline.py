"""When the operations of a step run: a discrete-event model of one rank. Pure.

A step is a list of operations in the order in which the engine issues them. Operations of one stream run one after the
other; each also waits for those that it names, for the resource that it occupies (compute, the link in the node, the
network, each way of PCIe, the disk), and for the host to issue it. All ranks do the same at the same time, so one of
them stands for all, and a collective takes as long as its link does.

Steps follow one another: an operation may wait for one of the step before, and what is left of a step (updates, gathers
of new weights) runs under the next. The time of a step is the distance between two of them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

COMPUTE = "compute"
SENDING = ("gather", "reduce", "share", "tp")
MOVING = ("up", "down", "disk")
_STEPS = 4
"""How many steps are run. The last but one counts: it follows others, and another one follows it."""


class Operation(NamedTuple):
    """What one stream does without a break.

    what       compute, update, gather, reduce, share, tp, up, down or disk: what a wait for it is counted as
    after      operations that it waits for, each by its distance in the list: 1 is the one before it, and from the
               first operation of a step, 1 is the last of the step before
    issue_s    what the host takes to issue it
    stolen_s   of its seconds, those in which it keeps the cores from computing: where ranks compute on the CPU
    """

    stream: str
    resource: str
    seconds: float
    what: str
    after: tuple[int, ...] = ()
    issue_s: float = 0.0
    stolen_s: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """A step in the middle of many.

    busy_s   seconds that each resource is in use
    waits_s  seconds that the compute stream is idle, by what runs meanwhile that it waits for
    """

    step_s: float
    busy_s: dict[str, float]
    waits_s: dict[str, float]

    @property
    def exposed_s(self) -> float:
        """Seconds in which computation waits for communication."""
        return sum(self.waits_s.get(what, 0.0) for what in SENDING)

    @property
    def bound_by(self) -> str:
        """The resource that is in use for the largest part of the step."""
        return max(self.busy_s, key=lambda resource: self.busy_s[resource], default=COMPUTE)


def run(step: Sequence[Operation]) -> Timeline:
    """Run the same step several times in a row.

    >>> gather = Operation("gather", "link", 2.0, "gather")
    >>> run([gather, Operation(COMPUTE, COMPUTE, 3.0, COMPUTE, after=(1,))]).step_s  # the next gather is hidden
    3.0
    """
    if not step:
        return Timeline(0.0, {}, {})
    return _Run(step).timeline()


_NOTHING = -1


class _Run:
    """One simulation. `causes` are the operations whose end let each one start, by which a wait is explained."""

    def __init__(self, step: Sequence[Operation]) -> None:
        self._step = step
        count = _STEPS * len(step)
        self._starts = [0.0] * count
        self._ends: list[float | None] = [None] * count
        self._causes = [_NOTHING] * count
        self._issued = list(itertools.accumulate(operation.issue_s for _ in range(_STEPS) for operation in step))
        self._queues: dict[str, deque[int]] = defaultdict(deque)
        for index in range(count):
            self._queues[self._at(index).stream].append(index)
        self._stream_last: dict[str, int] = {}
        self._free: dict[str, tuple[float, int]] = {}
        self._waits: list[dict[str, float]] = [defaultdict(float) for _ in range(_STEPS)]
        self._last_end = [0.0] * _STEPS

    def timeline(self) -> Timeline:
        while any(self._queues.values()):
            self._start(*min(filter(None, map(self._candidate, self._queues.values()))))
        busy: dict[str, float] = defaultdict(float)
        for operation in self._step:
            busy[operation.resource] += operation.seconds
            if operation.resource != COMPUTE:
                busy[COMPUTE] += operation.stolen_s
        if issue_s := sum(operation.issue_s for operation in self._step):
            busy["host"] = issue_s
        return Timeline(self._last_end[-2] - self._last_end[-3], dict(busy), dict(self._waits[-2]))

    def _at(self, index: int) -> Operation:
        return self._step[index % len(self._step)]

    def _candidate(self, queue: deque[int]) -> tuple[float, int, int] | None:
        """When the first operation of a stream can start, which it is, and what let it start; None while something that
        it waits for has no end."""
        if not queue:
            return None
        index = queue[0]
        operation = self._at(index)
        ready, cause = self._issued[index], _NOTHING
        before = [index - distance for distance in operation.after if distance <= index]
        if operation.stream in self._stream_last:
            before.append(self._stream_last[operation.stream])
        for other in before:
            end = self._ends[other]
            if end is None:
                return None
            if end > ready:
                ready, cause = end, other
        free, other = self._free.get(operation.resource, (0.0, _NOTHING))
        if free > ready:
            ready, cause = free, other
        return ready, index, cause

    def _start(self, start: float, index: int, cause: int) -> None:
        operation = self._at(index)
        self._queues[operation.stream].popleft()
        if operation.stream == COMPUTE:
            self._explain_wait(start, index, cause)
        end = start + operation.seconds
        self._starts[index], self._ends[index], self._causes[index] = start, end, cause
        self._stream_last[operation.stream] = index
        self._free[operation.resource] = end, index
        if operation.stolen_s and operation.resource != COMPUTE:
            free, _ = self._free.get(COMPUTE, (0.0, _NOTHING))
            self._free[COMPUTE] = max(free, start) + operation.stolen_s, index
        if operation.stream == COMPUTE:
            self._last_end[index // len(self._step)] = end

    def _explain_wait(self, start: float, index: int, cause: int) -> None:
        """Follow the chain of what ran while the compute stream was idle, each waiting for the one before it."""
        waits = self._waits[index // len(self._step)]
        last = self._stream_last.get(COMPUTE)
        since = (self._ends[last] or 0.0) if last is not None else 0.0
        until = start
        while until > since:
            if cause == _NOTHING:
                waits["host"] += until - since
                return
            began = max(self._starts[cause], since)
            waits[self._at(cause).what] += until - began
            until, cause = min(until, began), self._causes[cause]
