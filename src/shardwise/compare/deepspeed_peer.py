"""DeepSpeed as a row. Imported only by an interpreter that has it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from shardwise.compare.job import LEARNING_RATE, WEIGHT_DECAY, peer_settings
from shardwise.compare.systems import System
from shardwise.models.loading import loss_of
from shardwise.tensors import map_tensors


class DeepSpeed(System):
    """Stages 1 to 3. A bucket size of "auto" is the whole model, at most 5e8 elements (DeepSpeed's own default)."""

    has_master = True

    def wrap(self, model: nn.Module) -> Any:
        os.environ.setdefault("DS_ACCELERATOR", self.job.device.type)
        import deepspeed  # type: ignore[import-not-found]  # a peer

        deepspeed.utils.logger.setLevel("ERROR")
        params = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(params, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
        deepspeed.init_distributed(dist_init_required=False, verbose=False)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=self._config(params))
        return engine

    def make_optimizer(self) -> torch.optim.Optimizer:
        inner: torch.optim.Optimizer = self.wrapped.optimizer.optimizer
        return inner

    def forward(self, batch: dict[str, Any], is_last: bool) -> torch.Tensor:
        dtype = self.job.dtype
        cast = map_tensors(batch, lambda t: t.to(dtype) if t.is_floating_point() else t)
        return loss_of(self.wrapped(**cast))

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        self.wrapped.backward(loss)
        if not is_last:
            self.wrapped.step()

    def update(self) -> None:
        self.wrapped.step()

    def shards(self) -> Iterable[torch.Tensor]:
        return (param.ds_tensor for param in self.model.parameters() if hasattr(param, "ds_tensor"))

    def weights(self) -> Iterator[torch.Tensor]:
        import deepspeed

        for param in self.model.parameters():
            with deepspeed.zero.GatheredParameters([param], enabled=self.job.row.preset == "zero3"):
                yield param.detach()

    def expected_wire_bytes(self) -> int:
        return self._wire_bytes(self.job.row.preset)

    def _config(self, params: list[nn.Parameter]) -> dict[str, Any]:
        settings = self.job.settings
        config = peer_settings(f"deepspeed_{self.job.row.preset}")
        zero: dict[str, Any] = config["zero_optimization"]  # type: ignore[assignment]  # JSON
        numel = sum(param.numel() for param in params)
        for key, value in zero.items():
            if value == "auto":
                zero[key] = min(numel, 500_000_000)
        return {
            **config,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": settings.accumulate,
            "gradient_clipping": settings.clip_norm or 0.0,
            **({} if settings.precision == "fp32" else {settings.precision: {"enabled": True}}),
        }
