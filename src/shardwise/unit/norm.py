"""The global gradient norm: one number, the same bits on every rank and under every placement.

Both ways start from the reduced shards, which every placement has, and never wait for the device.

- Ordinary: each shard's sum of squares, added up in fp64, over units and ranks in one fixed order. It depends on where
  shards are cut, so on W and on the division into units, but not on the stage.
- Exact: it depends on the values alone. Squares of fp32 values are exact in fp64. Each is split at fixed bit positions
  below the largest square of all, so coarsely that every sum of equal parts is exact, and the order of addition cannot
  matter. Parts of 16 bits leave room for 2^36 elements; four keep a relative error below 2^-27.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shardwise.comm import Comm

_BLOCK_NUMEL = 1 << 16
_BITS, _PARTS = 16, 4


def global_norm(shards: Sequence[torch.Tensor], comm: Comm, exact: bool) -> torch.Tensor:
    """The norm over all shards of all ranks, fp64, on the device."""
    if not shards:
        return torch.zeros((), dtype=torch.float64, device=comm.device)
    return _exact_norm(shards, comm) if exact else norm_from_sums(sums_of_squares(shards, comm), comm)


def clip_coefficient(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """What gradients are multiplied with so that their norm is at most `limit`; fp32, on the device."""
    return (limit / (norm + 1e-6)).clamp(max=1.0).to(torch.float32)


def sums_of_squares(shards: Sequence[torch.Tensor], comm: Comm) -> torch.Tensor:
    """Of each shard, fp64; a shard's has the same bits alone and among others."""
    if comm.kernels == "cpu":
        return torch.stack([_sum_of_squares(shard, comm) for shard in shards])
    # One launch for all. Shards are of one dtype and aligned alike under every placement, so the bits are too.
    norms = torch._foreach_norm(list(shards), 2, dtype=torch.float32)
    return torch.stack(norms).to(torch.float64).square()


def norm_from_sums(sums: torch.Tensor, comm: Comm) -> torch.Tensor:
    """The ordinary norm over all ranks from the sums of squares of this rank's shards."""
    norm: torch.Tensor = comm.share(sums).sum().sqrt()
    return norm


def _sum_of_squares(shard: torch.Tensor, comm: Comm) -> torch.Tensor:
    """Blocks in fp32, their sums in fp64."""
    blocks = (block.to(torch.float32) for block in comm.blocks(shard, _BLOCK_NUMEL))
    sums = [torch.dot(block, block) for block in blocks]
    return torch.stack(sums).to(torch.float64).sum() if sums else torch.zeros((), dtype=torch.float64)


def _exact_norm(shards: Sequence[torch.Tensor], comm: Comm) -> torch.Tensor:
    largest = torch.stack([shard.abs().amax() if shard.numel() else shard.new_zeros(()) for shard in shards]).amax()
    top = comm.share(largest.to(torch.float64)).amax().square()
    # The smallest power of two above the largest square. frexp keeps it exact; non-finite values pass through.
    ceiling = torch.ldexp(torch.ones_like(top), torch.frexp(top).exponent)
    sums = torch.zeros(_PARTS, dtype=torch.float64, device=top.device)
    for shard in shards:
        for block in _blocks(shard, comm):
            sums += _split_sums(block.square_(), ceiling)
    total = comm.share(sums).sum(dim=0)
    return torch.where(torch.isfinite(top), total.sum(), top).sqrt()


def _split_sums(squares: torch.Tensor, ceiling: torch.Tensor) -> torch.Tensor:
    """The sums of the parts of `squares` between fixed bit positions; each is exact, whatever the order."""
    sums = []
    for part in range(1, _PARTS + 1):
        # Adding and subtracting 1.5 * 2^52 grids rounds to a multiple of the grid.
        anchor = ceiling * (2.0 ** (-_BITS * part) * 1.5 * 2.0**52)
        rounded = (squares + anchor).sub_(anchor)
        squares = squares - rounded
        sums.append(rounded.sum())
    return torch.stack(sums)


def _blocks(shard: torch.Tensor, comm: Comm) -> Iterator[torch.Tensor]:
    """Fresh fp64 copies of a shard, a block at a time."""
    block = _BLOCK_NUMEL if comm.kernels == "cpu" else max(1, -(-shard.numel() // 8))
    for part in comm.blocks(shard, block):
        yield part.to(torch.float64, copy=True)
