"""Weights that the first and the last stage both have: each has a copy, and both get the sum of the gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from shardwise.engine import Engine
from shardwise.partition import dtensors
from shardwise.pipelining.cut import StageCut, names_on_last

_BLOCK_NUMEL = 1 << 20


@dataclass
class TiedWeights:
    """The names of tied parameters on the first and on the last stage; the shapes of those that are trained."""

    names: dict[str, str]
    shapes: dict[str, torch.Size]
    last: int
    counted_twice: float | torch.Tensor = 0.0
    """The squares of their gradients that the norm of this rank's stages has once too often."""
    _sums: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, where: StageCut) -> TiedWeights:
        found = names_on_last(model, where)
        trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        shapes = {name: param.shape for name, param in trained if name in found}
        return cls(found, shapes, where.count - 1)

    def attach(self, engines: Mapping[int, Engine]) -> None:
        """Have the engines of the first and the last stage put the sums in place of their gradients."""
        for stage, engine in engines.items():
            for first, name in self._here(stage):
                engine.register_grad_hook(partial(self._put, engine, first, name))

    def share(self, engines: Mapping[int, Engine], group: dist.ProcessGroup) -> None:
        """Add up the reduced gradients of both stages. A collective of the pipeline."""
        self.counted_twice = 0.0
        for first in self.shapes:
            total = torch.zeros(self.shapes[first], device=next(iter(engines.values())).comm.device)
            for stage, engine in engines.items():
                for key, name in self._here(stage):
                    if key == first:
                        total += engine.full_grad(name)
            dist.all_reduce(total, group=group)
            self._sums[first] = total
            if self.last in engines:  # in blocks: a copy in fp64 would be twice as large as the embedding
                squares = [block.double().square().sum() for block in total.view(-1).split(_BLOCK_NUMEL)]
                self.counted_twice = self.counted_twice + torch.stack(squares).sum()

    def forget(self) -> None:
        """Free the sums, once the engines have their parts of them."""
        self._sums.clear()

    def _here(self, stage: int) -> list[tuple[str, str]]:
        if stage not in (0, self.last):
            return []
        return [(first, first if stage == 0 else self.names[first]) for first in self.shapes]

    def _put(self, engine: Engine, first: str, name: str, unit_name: str, shard: torch.Tensor) -> None:
        for unit in engine.units:
            if unit.name == unit_name and name in unit.names:
                slot, owned = unit.layout.slot(name), unit.layout.shard(engine.comm.shard_index)
                part = slot.span.intersect(owned)
                if part:
                    param = unit.params[unit.names.index(name)]
                    flat = dtensors.cut(param, self._sums[first]).reshape(-1)
                    shard[part.shift(-owned.start).slice] = flat[part.shift(-slot.span.start).slice]
