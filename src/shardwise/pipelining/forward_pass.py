"""A forward through all stages, one after the other, outside of a schedule: for evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.engine import Engine
from shardwise.pipelining.stage_call import StageCall


class ForwardPass:
    """Runs batches through the stages of a pipeline; `owners` has the rank of each stage in `group`.

    Unlike a schedule it takes batches of any shape: a stage sends the shape with the values.
    """

    def __init__(
        self,
        engines: Mapping[int, Engine],
        calls: Mapping[int, StageCall],
        owners: Sequence[int],
        group: dist.ProcessGroup,
    ) -> None:
        self.engines = engines
        self.calls = calls
        self.group = group
        self._owners = owners
        self._rank = dist.get_rank(group)

    @torch.no_grad()
    def loss(self, batch: Any) -> torch.Tensor:
        """The loss of a batch, on all ranks of the pipeline. A collective."""
        hidden: torch.Tensor | None = None
        for stage, owner in enumerate(self._owners):
            if owner == self._rank:
                received = () if hidden is None else (hidden,)
                self.calls[stage].micro_batches = [batch]
                hidden = self.engines[stage](*received, index=torch.zeros(1, dtype=torch.long))
                self.calls[stage].micro_batches = []
            if stage + 1 < len(self._owners):
                hidden = self._hand_on(hidden, owner, self._owners[stage + 1])
        last = self._owners[-1]
        loss = hidden.float().reshape(()) if hidden is not None and last == self._rank else self._blank((), torch.float)
        dist.broadcast(loss, group=self.group, group_src=last)
        return loss

    def _hand_on(self, hidden: torch.Tensor | None, source: int, target: int) -> torch.Tensor | None:
        if source == target or self._rank not in (source, target):
            return hidden
        if self._rank == source:
            assert hidden is not None
            dist.send_object_list([(tuple(hidden.shape), hidden.dtype)], group=self.group, group_dst=target)
            dist.send(hidden.contiguous(), group=self.group, group_dst=target)
            return None
        told: list[Any] = [None]
        dist.recv_object_list(told, group=self.group, group_src=source)
        hidden = self._blank(*told[0])
        dist.recv(hidden, group=self.group, group_src=source)
        return hidden

    def _blank(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=next(iter(self.engines.values())).comm.device)
