"""The global gradient norm: one number, the same bits on every rank and under every placement.

Both ways start from the reduced shards, which every placement has, and never wait for the device. Under tensor
parallelism they go over both axes, and elements that several ranks hold count once (`Layout.counted`).

- Ordinary: each shard's sum of squares, added up in fp64, over units and ranks in one fixed order. It depends on where
  shards are cut, so on W and on the division into units, but not on the stage.
- Exact: it depends on the values alone. Squares of fp32 values are exact in fp64. Each is split at fixed bit positions
  below the largest square of all, so coarsely that every sum of equal parts is exact, and the order of addition cannot
  matter. Parts of 16 bits leave room for 2^36 elements; four keep a relative error below 2^-27.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from shardwise.comm import Comm

_BLOCK_NUMEL = 1 << 16
_BITS, _PARTS = 16, 4


def clip_coefficient(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """The factor for gradients that makes their norm at most `limit`; fp32, on the device. The small term is that of
    `torch.nn.utils.clip_grad_norm_`."""
    return (limit / (norm + 1e-6)).clamp(max=1.0).to(torch.float32)


def sums_of_squares(shards: Sequence[Sequence[torch.Tensor]], comm: Comm) -> torch.Tensor:
    """The sum of squares of each shard, given in parts; fp64. A shard's has the same bits alone and among others."""
    parts = [part for shard in shards for part in shard]
    if not parts:
        return torch.zeros(len(shards), dtype=torch.float64, device=comm.device)
    if comm.kernels == "cpu":
        sums = torch.stack([_sum_of_squares(part, comm) for part in parts])
    else:
        # One launch for all. Shards have one dtype and one alignment under every placement, so the bits are the same.
        norms = torch._foreach_norm(parts, 2, dtype=torch.float32)
        sums = torch.stack(norms).to(torch.float64).square()
    counts = [len(shard) for shard in shards]
    return sums if set(counts) == {1} else torch.stack([each.sum() for each in sums.split(counts)])


def sum_of_squares(shard: Sequence[torch.Tensor], comm: Comm) -> torch.Tensor:
    """Like `sums_of_squares`, for one shard."""
    return sums_of_squares([shard], comm)[0]


def norm_from_sums(sums: torch.Tensor, comm: Comm) -> torch.Tensor:
    """The ordinary norm over all ranks from the sums of squares of this rank's shards."""
    norm: torch.Tensor = comm.model_group.share(comm.share(sums).sum()).sum().sqrt()
    return norm


def _sum_of_squares(shard: torch.Tensor, comm: Comm) -> torch.Tensor:
    """Blocks in fp32, their sums in fp64."""
    blocks = (block.to(torch.float32) for block in comm.blocks(shard, _BLOCK_NUMEL))
    sums = [torch.dot(block, block) for block in blocks]
    return torch.stack(sums).to(torch.float64).sum() if sums else torch.zeros((), dtype=torch.float64)


def exact_norm(parts: Iterable[torch.Tensor], comm: Comm) -> torch.Tensor:
    """The exact norm over all parts of all ranks, fp64, on the device."""
    tops = [part.abs().amax().to(torch.float64) for part in parts if part.numel()]
    largest = torch.stack(tops).amax() if tops else torch.zeros((), dtype=torch.float64, device=comm.device)
    top = comm.model_group.share(comm.share(largest).amax()).amax().square()
    # The smallest power of two above the largest square. frexp keeps it exact; non-finite values pass through.
    ceiling = torch.ldexp(torch.ones_like(top), torch.frexp(top).exponent)
    sums = torch.zeros(_PARTS, dtype=torch.float64, device=top.device)
    for part in parts:
        for block in _blocks(part, comm):
            sums += _split_sums(block.square_(), ceiling)
    total = comm.model_group.share(comm.share(sums).sum(dim=0)).sum(dim=0)
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
