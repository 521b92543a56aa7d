"""From reduced gradients to what an update multiplies them with: the global norm, the loss scale and clipping.

All of it stays on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from shardwise.comm import Comm
from shardwise.unit import norm
from shardwise.unit.reduced_shard import ReducedShard


class Clip(NamedTuple):
    """The norm without the loss scale, whether gradients overflowed, and 1/scale and clipping in one number."""

    grad_norm: torch.Tensor
    overflow: torch.Tensor | None
    coefficient: torch.Tensor | None


def grad_norm(shards: Sequence[ReducedShard], comm: Comm, exact: bool) -> torch.Tensor:
    """The global norm. Offloaded shards left their part of it on the device; only the exact norm fetches them."""
    if exact:
        return norm.global_norm(_Tensors(shards), comm, exact=True)
    here = [shard.tensor for shard in shards if not shard.is_offloaded]
    if len(here) == len(shards):
        return norm.global_norm(here, comm, exact=False)
    known = iter(norm.sums_of_squares(here, comm)) if here else iter(())
    sums = [shard.sum_of_squares(comm) if shard.is_offloaded else next(known) for shard in shards]
    return norm.norm_from_sums(torch.stack(sums), comm)


def unscale(grad_norm: torch.Tensor, scale: torch.Tensor | None, limit: float | None) -> Clip:
    """From the norm of gradients of a loss that was multiplied with `scale`."""
    overflow = None
    if scale is not None:
        overflow = ~grad_norm.isfinite()
        grad_norm = grad_norm / scale
    coefficient = norm.clip_coefficient(grad_norm, limit) if limit else None
    if scale is not None:
        coefficient = (1.0 if coefficient is None else coefficient) / scale
    # With a dimension it takes part in promotion: its product with gradients of 16 bits is computed and stored in fp32.
    return Clip(grad_norm, overflow, None if coefficient is None else coefficient.view(1))


class _Tensors(Sequence[torch.Tensor]):
    """The values of shards, of which offloaded ones are fetched one at a time."""

    def __init__(self, shards: Sequence[ReducedShard]) -> None:
        self._shards = shards

    def __len__(self) -> int:
        return len(self._shards)

    def __getitem__(self, index: Any) -> Any:
        return self._shards[index].tensor
