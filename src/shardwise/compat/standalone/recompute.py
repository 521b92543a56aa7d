"""`deepspeed.checkpointing`: torch's activation checkpointing, without settings of its own."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from shardwise.compat.standalone.utils import logger

_configured: dict[str, Any] = {}


def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of `function(*args, **kwargs)`, whose activations are computed again in the backward."""
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


def configure(mpu_: Any, deepspeed_config: Any = None, **options: Any) -> None:
    """Note that the settings have no effect: they partition activations over tensor-parallel ranks, or time them."""
    if not _configured and any(options.values()):
        given = ", ".join(key for key, value in options.items() if value)
        logger.warning("deepspeed.checkpointing.configure: %s: no effect in shardwise", given)
    _configured.update(options, is_configured=True)


def is_configured() -> bool:
    return bool(_configured)


def reset() -> None:
    """Does nothing: no buffers are kept."""


class RandomStreams:
    """Megatron's named random streams, which differ between the ranks that share a layer. Here no ranks share one:
    what is drawn comes from torch's generators."""

    def add(self, name: str, seed: int) -> None:
        """Does nothing."""

    def fork(self, name: str = "model-parallel-rng") -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def reset(self) -> None:
        """Does nothing."""

    def get_states(self) -> dict[str, torch.Tensor]:
        return {}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Does nothing."""


def get_cuda_rng_tracker() -> RandomStreams:
    return RandomStreams()


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed torch's generators, all ranks alike."""
    torch.manual_seed(seed)


non_reentrant_checkpoint = checkpoint
