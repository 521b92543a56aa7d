"""What a run trains with, an engine or a pipeline of engines; the loop drives both alike."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from shardwise.engine.engine import Engine

if TYPE_CHECKING:  # torch's pipelining takes seconds to import
    from shardwise.pipelining.pipeline import Pipeline

Samples = tuple[torch.Tensor, torch.Tensor]
Phase = Callable[[str], contextlib.AbstractContextManager[Any]]


class EngineTrainer:
    """Trains with one engine. `engines` are those of this rank."""

    def __init__(self, model: Engine) -> None:
        self.model = model
        self.engines = (model,)

    def step(self, batches: Iterable[Samples], count: int, phase: Phase) -> torch.Tensor:
        """Train on the micro-batches of a step, `count` of them; their mean loss."""
        losses = torch.zeros((), device=self.model.comm.device)
        for inputs, targets in batches:
            with phase("forward"):
                loss = self.model(inputs, targets)
            losses += loss.detach() / count
            with phase("backward"):
                self.model.backward(loss)
            del loss
            with phase("update"):
                self.model.step()
        return losses

    @torch.no_grad()
    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of a batch, without training on it."""
        self.model.eval()
        loss: torch.Tensor = self.model(inputs, targets)
        self.model.train()
        return loss


class PipelineTrainer:
    """Trains with a pipeline, which runs the micro-batches of a step itself."""

    def __init__(self, model: Pipeline) -> None:
        self.model = model
        self.engines = tuple(model.engines.values())

    def step(self, batches: Iterable[Samples], count: int, phase: Phase) -> torch.Tensor:
        inputs, targets = zip(*batches, strict=True)
        return self.model.train_step((torch.cat(inputs), torch.cat(targets)))

    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.model.evaluate((inputs, targets))


Trainer = EngineTrainer | PipelineTrainer
