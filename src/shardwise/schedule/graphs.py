"""The graphs of forwards: how often each of them used a unit, and which a backward may still go through.

A step may have several forwards before its first backward, and these either one backward together (the sum of two
losses) or one each, in any order (the micro-batches of a pipeline). So uses are counted for each forward. The hooks in
what autograd has recorded refer to their `ForwardGraph`, which lives as long as any of them: a forward without a
backward is forgotten when its outputs are.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from dataclasses import dataclass
from operator import call

from shardwise.unit import Unit


@dataclass
class UseCounts:
    """How often a forward used a unit; says when its gradients are complete.

    with_grad      uses with gradients on; the backward leaves the first of them last
    without_grad   uses with gradients off inside a forward that has them on: a re-entrant checkpoint will recompute
    recomputed     recomputations that the backward has left
    """

    with_grad: int = 0
    without_grad: int = 0
    recomputed: int = 0


class ForwardGraph:
    """What a forward used. It is spent when a backward has been through it. Later ones have higher numbers."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_spent = False
        self.uses: defaultdict[Unit, UseCounts] = defaultdict(UseCounts)

    def has_used(self, unit: Unit) -> bool:
        uses = self.uses.get(unit)
        return uses is not None and bool(uses.with_grad or uses.without_grad or uses.recomputed)

    def spend(self) -> None:
        """A backward has been through it; another one may follow if it retained the graph."""
        self.is_spent = True
        for uses in self.uses.values():
            uses.recomputed = 0


class ForwardGraphs:
    """The graphs that wait for a backward or are in one; `newest` counts the uses of the forward that runs, and
    `in_backward` is the one that the current backward has reached last.

    Spent ones are forgotten, however long the user keeps their losses, until another backward reaches them.
    """

    def __init__(self) -> None:
        self._waiting: list[weakref.ref[ForwardGraph]] = []
        self._reached: list[ForwardGraph] = []
        self._count = 0
        self.begin()

    def begin(self) -> None:
        """A forward begins."""
        self._count += 1
        self.newest = ForwardGraph(self._count)
        self._waiting = [ref for ref in self._waiting if (graph := ref()) is not None and not graph.is_spent]
        self._waiting.append(weakref.ref(self.newest))

    def reach(self, graph: ForwardGraph) -> None:
        """A backward has reached a graph. Autograd goes through later ones first."""
        if graph not in self._reached:
            self._reached.append(graph)

    @property
    def are_recomputed(self) -> bool:
        """Whether a re-entrant checkpoint will recompute something in a backward."""
        graphs = (ref() for ref in self._waiting)
        return any(uses.without_grad for graph in graphs if graph is not None for uses in graph.uses.values())

    @property
    def in_backward(self) -> ForwardGraph:
        return self._reached[-1] if self._reached else self.newest

    def end_backward(self, spends: bool = True) -> None:
        """A backward has ended, and leaves its graphs spent unless its gradients go elsewhere."""
        for graph in self._reached if spends else ():
            graph.spend()
        self._reached = []

    def using(self, unit: Unit, before: ForwardGraph | None = None) -> list[ForwardGraph]:
        """The graphs that use a unit and have had no backward, or are in one; of those `before` another, if given."""
        last = math.inf if before is None else before.number
        graphs = {*self._reached, *map(call, self._waiting)}
        return [graph for graph in graphs if graph is not None and graph.number < last and graph.has_used(unit)]
