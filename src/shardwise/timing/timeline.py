"""When the operations of a step run: a discrete-event model of one rank. Pure.

A step is a list of operations in the order in which the engine issues them. Operations of one stream run one after the
other; each also waits for those that it names, for the resource that it occupies (compute, the link in the node, the
network, each way of PCIe, the disk), and for the host to issue it. All ranks do the same at the same time, so one of
them stands for all, and a collective takes as long as its link does.

Steps follow one another: an operation may wait for one of the step before, and what is left of a step (updates, gathers
of new weights) runs under the next. The time of a step is the distance between two of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

COMPUTE = "compute"
SENDING = ("gather", "reduce", "share", "tp")
MOVING = ("up", "down", "disk")
_STEPS = 4
"""So many steps are run; the last one counts. Two would do where nothing runs across more than one border."""


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
    waits_s  seconds that the compute stream is idle, by what it waits for
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


class _Run:
    def __init__(self, step: Sequence[Operation]) -> None:
        self._step = step
        self._ends: list[float | None] = [None] * (_STEPS * len(step))
        self._issued = self._issue_times()
        self._queues: dict[str, deque[int]] = defaultdict(deque)
        for index in range(len(self._ends)):
            self._queues[self._at(index).stream].append(index)
        self._stream_free: Counter[str] = Counter()
        self._free: Counter[str] = Counter()
        self._waits: list[Counter[str]] = [Counter() for _ in range(_STEPS)]
        self._last_end = [0.0] * _STEPS

    def timeline(self) -> Timeline:
        while any(self._queues.values()):
            self._start(*min(filter(None, map(self._candidate, self._queues.values()))))
        step_s = self._last_end[-1] - self._last_end[-2]
        busy: Counter[str] = Counter()
        for operation in self._step:
            busy[operation.resource] += operation.seconds
            if operation.resource != COMPUTE:
                busy[COMPUTE] += operation.stolen_s
        if issue_s := sum(operation.issue_s for operation in self._step):
            busy["host"] = issue_s
        return Timeline(step_s, dict(busy), dict(self._waits[-1]))

    def _at(self, index: int) -> Operation:
        return self._step[index % len(self._step)]

    def _issue_times(self) -> list[float]:
        clock, times = 0.0, []
        for _ in range(_STEPS):
            for operation in self._step:
                clock += operation.issue_s
                times.append(clock)
        return times

    def _candidate(self, queue: deque[int]) -> tuple[float, int] | None:
        """When the first operation of a stream can start, and which it is; None while what it waits for has no end."""
        if not queue:
            return None
        index = queue[0]
        operation = self._at(index)
        ready = max(self._stream_free[operation.stream], self._issued[index], self._free[operation.resource])
        for distance in operation.after:
            if distance <= index:  # otherwise it was before the first step
                end = self._ends[index - distance]
                if end is None:
                    return None
                ready = max(ready, end)
        return ready, index

    def _start(self, start: float, index: int) -> None:
        operation, number = self._at(index), index // len(self._step)
        self._queues[operation.stream].popleft()
        if operation.stream == COMPUTE:
            self._note_wait(start, index, operation)
        end = start + operation.seconds
        self._ends[index] = self._stream_free[operation.stream] = self._free[operation.resource] = end
        if operation.stolen_s and operation.resource != COMPUTE:
            self._free[COMPUTE] = max(self._free[COMPUTE], start) + operation.stolen_s
        if operation.stream == COMPUTE:
            self._last_end[number] = end

    def _note_wait(self, start: float, index: int, operation: Operation) -> None:
        idle = start - self._stream_free[COMPUTE]
        if idle <= 0:
            return
        causes = [(self._issued[index], "host")]
        causes += [
            (self._ends[index - distance] or 0.0, self._at(index - distance).what)
            for distance in operation.after
            if distance <= index
        ]
        if self._free[operation.resource] >= start:
            causes.append((start, "cores" if operation.resource == COMPUTE else operation.resource))
        self._waits[index // len(self._step)][max(causes)[1]] += idle
