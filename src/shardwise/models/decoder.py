"""A decoder of given dimensions, written plainly, for dry runs of models of which only the dimensions are known.

It keeps for the backward what a good implementation keeps: fused norms and attention, rotary positions, gated MLPs,
experts of equal load. Its logits are computed in fp32, as Hugging Face's are.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from shardwise.models.built_in import Batch, MakeBatch
from shardwise.models.dimensions import Dimensions, Experts, Latent


class _Norm(nn.Module):
    """RMSNorm, or LayerNorm where it has biases."""

    def __init__(self, width: int, has_bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if has_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is not None:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias)
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-6)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """x cos + rotate(x) sin, with the tables of rotary positions."""
    length, dim = x.shape[-2:]
    half = dim // 2
    rates = 10_000.0 ** -(torch.arange(half, device=x.device) / half)
    angles = torch.outer(torch.arange(length, device=x.device), rates).repeat(1, 2)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class _Attention(nn.Module):
    def __init__(self, of: Dimensions) -> None:
        super().__init__()
        self.of = of
        query, keys = of.heads * of.head_dim, of.kv_heads * of.head_dim
        self.q_proj = nn.Linear(of.hidden, query, of.qkv_bias)
        self.k_proj = nn.Linear(of.hidden, keys, of.qkv_bias)
        self.v_proj = nn.Linear(of.hidden, keys, of.qkv_bias)
        self.o_proj = nn.Linear(query, of.hidden, of.out_bias)
        self.q_norm = _Norm(of.head_dim) if of.qk_norm else nn.Identity()
        self.k_norm = _Norm(of.head_dim) if of.qk_norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        of = self.of
        q = self.q_norm(self.q_proj(x).view(batch, length, of.heads, of.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, of.kv_heads, of.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, of.kv_heads, of.head_dim).transpose(1, 2)
        if not of.positions:
            q, k = _rotated(q), _rotated(k)
        grouped = of.kv_heads != of.heads
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        out: torch.Tensor = self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))
        return out


class _LatentAttention(nn.Module):
    """Queries, keys and values through low-rank latents."""

    def __init__(self, of: Dimensions, latent: Latent) -> None:
        super().__init__()
        self.of, self.latent = of, latent
        query = of.heads * (latent.nope_dim + latent.rope_dim)
        if latent.query_rank:
            self.q_a_proj: nn.Module = nn.Linear(of.hidden, latent.query_rank, False)
            self.q_norm: nn.Module = _Norm(latent.query_rank)
        else:
            self.q_a_proj = self.q_norm = nn.Identity()
        self.q_proj = nn.Linear(latent.query_rank or of.hidden, query, False)
        self.kv_a_proj = nn.Linear(of.hidden, latent.key_rank + latent.rope_dim, False)
        self.kv_norm = _Norm(latent.key_rank)
        self.kv_b_proj = nn.Linear(latent.key_rank, of.heads * (latent.nope_dim + latent.value_dim), False)
        self.o_proj = nn.Linear(of.heads * latent.value_dim, of.hidden, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads, latent = self.of.heads, self.latent
        q = self.q_proj(self.q_norm(self.q_a_proj(x))).view(batch, length, heads, -1).transpose(1, 2)
        q_nope, q_rope = q.split((latent.nope_dim, latent.rope_dim), -1)
        compressed, k_rope = self.kv_a_proj(x).split((latent.key_rank, latent.rope_dim), -1)
        kv = self.kv_b_proj(self.kv_norm(compressed)).view(batch, length, heads, -1).transpose(1, 2)
        k_nope, v = kv.split((latent.nope_dim, latent.value_dim), -1)
        k_rope = _rotated(k_rope.unsqueeze(1)).expand(-1, heads, -1, -1)
        q, k = torch.cat((q_nope, _rotated(q_rope)), -1), torch.cat((k_nope, k_rope), -1)
        padded = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
        attended = F.scaled_dot_product_attention(q, k, padded, is_causal=True)[..., : latent.value_dim]
        out: torch.Tensor = self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))
        return out


class _MLP(nn.Module):
    def __init__(self, of: Dimensions, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(of.hidden, width, False) if of.gated else None
        self.up_proj = nn.Linear(of.hidden, width, of.out_bias)
        self.down_proj = nn.Linear(width, of.hidden, of.out_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up_proj(x)
        inner = F.gelu(up) if self.gate_proj is None else F.silu(self.gate_proj(x)) * up
        out: torch.Tensor = self.down_proj(inner)
        return out


class _Mixture(nn.Module):
    """Experts that get equal numbers of tokens, as a balanced router sends them."""

    def __init__(self, of: Dimensions, experts: Experts) -> None:
        super().__init__()
        self.experts = experts
        count, hidden, width = experts.count, of.hidden, experts.width
        self.router = nn.Linear(hidden, count, False)
        self.gate = nn.Parameter(torch.randn(count, hidden, width) * hidden**-0.5)
        self.up = nn.Parameter(torch.randn(count, hidden, width) * hidden**-0.5)
        self.down = nn.Parameter(torch.randn(count, width, hidden) * width**-0.5)
        self.shared = _MLP(of, experts.shared_width) if experts.shared_width else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        count, used = self.experts.count, self.experts.used
        shares, chosen = self.router(flat).softmax(-1).topk(used)
        load = -(-flat.shape[0] * used // count)
        rows = chosen.new_zeros(count * load)
        sent = flat[rows].view(count, load, -1)
        inner = F.silu(torch.bmm(sent, self.gate)) * torch.bmm(sent, self.up)
        back = torch.bmm(inner, self.down).view(count * load, -1)
        out = torch.zeros_like(flat).index_add(0, rows, back * shares.mean().to(back.dtype))
        if self.shared is not None:
            out = out + self.shared(flat)
        return out.view_as(x)


class _Layer(nn.Module):
    def __init__(self, of: Dimensions, index: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(_Norm(of.hidden, of.norm_biases) for _ in range(of.norms))
        self.attention = _LatentAttention(of, of.latent) if of.latent else _Attention(of)
        is_dense = of.experts is None or index < of.experts.dense_layers
        self.mlp = _MLP(of, of.width) if is_dense or of.experts is None else _Mixture(of, of.experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, *between, after = self.norms
        attended = self.attention(before(x))
        x = x + (between[0](attended) if between else attended)
        mixed = self.mlp((between[1] if between else after)(x))
        out: torch.Tensor = x + (after(mixed) if between else mixed)
        return out


class Decoder(nn.Module):
    """Tokens to the mean next-token loss."""

    def __init__(self, of: Dimensions) -> None:
        super().__init__()
        self.embed = nn.Embedding(of.vocabulary, of.hidden)
        self.position = nn.Embedding(of.positions, of.hidden) if of.positions else None
        self.layers = nn.ModuleList(_Layer(of, index) for index in range(of.layers))
        self.norm = _Norm(of.hidden, of.norm_biases)
        self.head = nn.Linear(of.hidden, of.vocabulary, bias=False)
        if of.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embed(inputs)
        if self.position is not None:
            x = x + self.position(torch.arange(inputs.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def decoder(of: Dimensions, batch: int, length: int) -> tuple[Decoder, MakeBatch]:
    """The model and its data, as `shardwise compare` takes them."""

    def make_batch(rank: int, step: int) -> Batch:
        return {"tokens": torch.zeros(batch, length + 1, dtype=torch.long)}

    return Decoder(of), make_batch


class _Adapted(nn.Module):
    """A frozen matrix with a trained one of low rank beside it."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.frozen(x) + self.up(self.down(x)) * 2.0
        return out


def adapt(model: nn.Module, rank: int, targets: tuple[str, ...]) -> None:
    """Freeze `model`, and put an adapter on every matrix whose name is among `targets`."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in targets and isinstance(child, nn.Linear):
                setattr(module, name, _Adapted(child, rank))
