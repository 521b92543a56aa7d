"""Small models for measurements, and the list of those that `shardwise compare` and `plan` know by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Batch = dict[str, torch.Tensor]
MakeBatch = Callable[[int, int], Batch]
"""A function of (rank, number of the micro-batch) that returns the model's arguments; equal calls, equal values."""
ModelAndData = tuple[nn.Module, MakeBatch]
Build = Callable[[], ModelAndData]


class MLP(nn.Module):
    """`depth` x [Linear(width, width), ReLU]; the loss is the mean square of the output."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).float().square().mean()
        return loss


class Block(nn.Module):
    """A pre-norm transformer layer; unless `fused`, queries, keys and values have a matrix each, which can be cut."""

    def __init__(self, hidden: int, heads: int, fused: bool = True) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, hidden // heads
        self.norm1 = nn.LayerNorm(hidden)
        if fused:
            self.qkv = nn.Linear(hidden, 3 * hidden)
        else:
            self.q, self.k, self.v = (nn.Linear(hidden, hidden) for _ in range(3))
        self.out = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self._heads(self.norm1(x))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out

    def _heads(self, x: torch.Tensor) -> Iterable[torch.Tensor]:
        """Queries, keys and values of the heads that are here, each [batch, heads, length, head_dim]."""
        if hasattr(self, "qkv"):
            fused: torch.Tensor = self.qkv(x)
            return fused.view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return [each(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in (self.q, self.k, self.v)]


class GPT(nn.Module):
    """A decoder with learned positions; the loss is next-token.

    `tied` shares the embedding with the head; `recompute` checkpoints the activations of every block; unless `fused`,
    tensor parallelism can cut it (see `tensor_parallel`).
    """

    def __init__(
        self,
        hidden: int,
        layers: int,
        heads: int,
        vocabulary: int,
        length: int,
        tied: bool = False,
        recompute: bool = False,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.fused = fused
        self.recompute = recompute
        self.vocabulary = vocabulary
        self.length = length
        self.embed = nn.Embedding(vocabulary, hidden)
        self.position = nn.Embedding(length, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, fused) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embed(inputs) + self.position(torch.arange(inputs.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Vectors(nn.Module):
    """`count` weight vectors, each used in one operation."""

    def __init__(self, width: int, count: int, strength: float) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.randn(width) for _ in range(count))
        self.strength = strength

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for vector in self.vectors:
            x = torch.addcmul(x, vector, x, value=self.strength)
        return x


class ManySmall(nn.Module):
    """`blocks` x `count` weight vectors: so little arithmetic that a system's overhead per parameter dominates."""

    def __init__(self, width: int, blocks: int, count: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList(Vectors(width, count, 1 / (blocks * count)) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


@dataclass(frozen=True)
class BuiltIn:
    """A model with a name: a summary, how to build it, and its data."""

    summary: str
    build: Callable[[], nn.Module]
    make_batch: MakeBatch


def vectors(batch: int, width: int) -> MakeBatch:
    """Random vectors."""
    return lambda rank, step: {"x": torch.randn(batch, width, generator=_generator(rank, step))}


def tokens(batch: int, length: int, vocabulary: int) -> MakeBatch:
    """Random texts of `length` + 1 tokens: the loss covers `length` of them."""
    shape = batch, length + 1
    return lambda rank, step: {"tokens": torch.randint(vocabulary, shape, generator=_generator(rank, step))}


def _generator(rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * step + rank)


def _mlp(width: int, depth: int, batch: int) -> BuiltIn:
    summary = f"{depth} x [Linear {width}, ReLU], batch {batch}"
    return BuiltIn(summary, partial(MLP, width, depth), vectors(batch, width))


def _gpt(
    hidden: int, layers: int, heads: int, vocabulary: int, batch: int, length: int, recompute: bool = False
) -> BuiltIn:
    summary = f"hidden {hidden}, {layers} layers, {batch} x {length} tokens"
    return BuiltIn(
        summary + ", activation checkpointing" * recompute,
        partial(GPT, hidden, layers, heads, vocabulary, length, recompute=recompute),
        tokens(batch, length, vocabulary),
    )


BUILT_IN: dict[str, BuiltIn] = {
    "mlp-100k": _mlp(128, 6, batch=4),
    "mlp-33m": _mlp(2048, 8, batch=32),
    "mlp-0.5b": _mlp(4096, 32, batch=16),
    "gpt-1m": _gpt(128, 4, 4, 512, batch=4, length=64),
    "gpt-26m": _gpt(512, 8, 8, 1000, batch=4, length=128),
    "gpt-1.3b": _gpt(2048, 24, 16, 32000, batch=4, length=2048, recompute=True),
    "gpt-2.7b": _gpt(2560, 32, 20, 32000, batch=8, length=1024, recompute=True),
    "small-2000": BuiltIn("2000 vectors of 1024, batch 4", partial(ManySmall, 1024, 200, 10), vectors(4, 1024)),
}
