"""The only place that calls collectives.

Gathers and reductions run on process groups of their own, so that a gather issued ahead never queues behind a
reduction. Bytes sent are counted by kind as they are issued. At W = 1 nothing is sent and the same code runs.

A reduction is an exchange: every rank sends to each other rank the part of its gradients that this rank owns, and
adds up what it received itself, in rank order. So the sum depends on nothing but the values (Gloo's reduce-scatter
is an all-reduce in disguise: twice the bytes, and from W = 3 on its bits depend on where buffers are cut).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

# Renamed in torch 2.13, where the old name warns.
_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_GATHER_TAG, _REDUCE_TAG = 0, 1


Blocks = Sequence[tuple[int, int]]
"""Parts of a long tensor, each from an element to before another, that are worked on one after the other."""


class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> Any: ...


class _Done:
    def wait(self) -> None:
        pass


class _All:
    """Several sends and receives as one. Gloo would wait for ever on a send it has waited for: each once."""

    def __init__(self, works: Sequence[Handle]) -> None:
        self._works = list(works)

    def wait(self) -> None:
        while self._works:
            self._works.pop(0).wait()


DONE: Handle = _Done()


class Comm:
    """Collectives over one data-parallel group, asynchronous and counted.

    `device` is where its tensors lie, `kernels` the kind of device that work is cut for: the same, but in a dry run.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.device = device
        self.kernels = device.type
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.sent_bytes: Counter[str] = Counter()
        ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        # Ranks that are part of the world cannot make groups without the others, and those they can make by themselves
        # cannot be made twice: they share the group they were given.
        is_world = len(ranks) == dist.get_world_size()
        self._own = [dist.new_group(ranks, group_desc=name) for name in ("gather", "reduce")] if is_world else []
        self._gather_group, self._reduce_group = self._own or [group, group]
        self._sends_directly = device.type == "cpu" and "gloo" in dist.get_backend(self._gather_group)

    def gather(self, full: torch.Tensor, kind: str) -> Handle:
        """Fill `full` from all ranks; each brings its own W-th part of it, in place."""
        if self.world_size == 1 or not full.numel():
            return DONE
        self._count(kind, full)
        parts = full.view(self.world_size, -1)
        if self._sends_directly:
            return self._gather_directly(parts)
        work: Handle = getattr(dist, _GATHER)(full, parts[self.rank], group=self._gather_group, async_op=True)
        return work

    def _gather_directly(self, parts: torch.Tensor) -> Handle:
        """Every rank sends its part to each other, into place. Gloo's own all-gather does so through a second buffer
        of the whole size, which no ledger sees, and takes twice as long."""
        mine = dict.fromkeys(range(self.world_size), parts[self.rank])
        return self._send_directly(mine, dict(enumerate(parts)), _GATHER_TAG)

    @property
    def rows_received(self) -> int:
        """How many parts `exchange` receives: those of all ranks, or of all others."""
        return self.world_size - self._sends_directly

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, kind: str) -> tuple[Handle, list[torch.Tensor]]:
        """Send the w-th row of `sent` to rank w; every rank's row for us, in rank order, once the handle is done.

        `received` has `rows_received` rows. Where it is one less than ranks, our own row is that of `sent`.
        """
        self._count(kind, sent)
        if not self._sends_directly:
            work: Handle = dist.all_to_all_single(
                received.view(-1), sent.view(-1), group=self._reduce_group, async_op=True
            )
            return work, list(received)
        rows = [*received[: self.rank], sent[self.rank], *received[self.rank :]]
        return self._send_directly(dict(enumerate(sent)), dict(enumerate(rows)), _REDUCE_TAG), rows

    def _send_directly(
        self, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor], tag: int
    ) -> Handle:
        """`sent[w]` to each other rank w, and from it into `received[w]`; tags keep kinds apart in one group."""
        group = self._gather_group if tag == _GATHER_TAG else self._reduce_group
        others = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        receives = [dist.irecv(received[other], group=group, group_src=other, tag=tag) for other in reversed(others)]
        sends = [dist.isend(sent[other], group=group, group_dst=other, tag=tag) for other in others]
        return _All([work for work in (*receives, *sends) if work is not None])

    def blocks(self, numel: int, block: int) -> Blocks:
        """`numel` elements in blocks of `block`."""
        return [(start, min(start + block, numel)) for start in range(0, numel, block)]

    def share(self, values: torch.Tensor) -> torch.Tensor:
        """A few values of every rank, on every rank: shape [W, *values.shape]. A control message."""
        if self.world_size == 1:
            return values.unsqueeze(0)
        everyone = values.new_empty(self.world_size, *values.shape)
        self._count("control", everyone)
        getattr(dist, _GATHER)(everyone.view(-1), values.contiguous().view(-1), group=self._reduce_group)
        return everyone

    def share_object(self, value: Any) -> list[Any]:
        """A small picklable value of every rank, on every rank. For looks inside, not in a step."""
        everyone = [value] * self.world_size
        if self.world_size > 1:
            with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
                dist.all_gather_object(everyone, value, group=self._reduce_group)
        return everyone

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Rank `source`'s values for everyone, at once. Used at start-up and by writes, not in a step."""
        if self.world_size > 1 and tensor.numel():
            dist.broadcast(tensor, group=self._gather_group, group_src=source)

    def close(self) -> None:
        """Give the process groups back."""
        for group in self._own:
            if dist.is_initialized():
                dist.destroy_process_group(group)

    def _count(self, kind: str, tensor: torch.Tensor) -> None:
        size_bytes = tensor.numel() * tensor.element_size()
        self.sent_bytes[kind] += size_bytes * (self.world_size - 1) // self.world_size
