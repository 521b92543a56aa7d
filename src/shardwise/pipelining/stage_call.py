"""What a stage computes of a micro-batch: the model's own forward, from the hidden states that it has received."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.errors import ConfigError
from shardwise.pipelining.cut import ReceivingBlock, StageEnd

LossFn = Callable[[Any, Any], torch.Tensor]


class StageCall:
    """Replaces the forward of a stage's model: `forward(*received, index)` runs micro-batch number `index`."""

    def __init__(self, part: nn.Module, loss_fn: LossFn | None) -> None:
        self.micro_batches: list[Any] = []
        self.number_of: Callable[[torch.Tensor], int] = int
        self._loss_fn = loss_fn
        self._entries = [module for module in part.modules() if isinstance(module, ReceivingBlock)]
        self._options = {"use_cache": False} if "use_cache" in inspect.signature(part.forward).parameters else {}
        vars(part)["forward"] = partial(self._run, part.forward)

    def _run(self, forward: Callable[..., Any], *received: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        for entry in self._entries:
            (entry.received,) = received
        batch = self.micro_batches[self.number_of(index)]
        try:
            return self._loss(forward, batch)
        except StageEnd as end:
            return end.value

    def _loss(self, forward: Callable[..., Any], batch: Any) -> torch.Tensor:
        if isinstance(batch, Mapping):
            output, target = forward(**{**self._options, **batch}), batch
        elif self._loss_fn is not None and isinstance(batch, (tuple, list)):
            output, target = forward(*batch[:-1], **self._options), batch[-1]
        else:
            args = batch if isinstance(batch, (tuple, list)) else (batch,)
            output, target = forward(*args, **self._options), None
        loss = self._loss_fn(output, target) if self._loss_fn is not None else getattr(output, "loss", output)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ConfigError(
                f"the model returned {type(output).__name__} and no loss: pass loss_fn=, or batches with labels"
            )
        return loss.reshape(1)
