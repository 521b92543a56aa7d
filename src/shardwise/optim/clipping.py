"""From reduced gradients to what an update multiplies them with: the global norm, the loss scale and clipping.

All of it stays on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

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
    if not shards:
        return torch.zeros((), dtype=torch.float64, device=comm.device)
    if exact:
        return norm.exact_norm(_CountedParts(shards), comm)
    here = [shard.counted_in(shard.tensor) for shard in shards if not shard.is_offloaded]
    sums = norm.sums_of_squares(here, comm)
    if len(here) < len(shards):
        known = iter(sums)
        sums = torch.stack([shard.sum_of_squares(comm) if shard.is_offloaded else next(known) for shard in shards])
    return norm.norm_from_sums(sums, comm)


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


class _CountedParts:
    """The counted parts of shards, of which offloaded ones are fetched one at a time."""

    def __init__(self, shards: Sequence[ReducedShard]) -> None:
        self._shards = shards

    def __iter__(self) -> Iterator[torch.Tensor]:
        for shard in self._shards:
            yield from shard.counted_in(shard.tensor)
