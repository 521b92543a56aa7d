"""`deepspeed.checkpointing`: torch's activation checkpointing, without settings of its own."""

from __future__ import annotations

from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from shardwise.compat.standalone.utils import logger

_configured: dict[str, Any] = {}


def checkpoint(function: Any, *args: Any) -> Any:
    """The result of `function(*args)`, whose activations are computed again in the backward."""
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False)


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


non_reentrant_checkpoint = checkpoint
