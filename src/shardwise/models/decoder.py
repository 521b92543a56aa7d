"""One decoder for all dimensions: `shardwise train` trains it as a Llama, the plan runs it on fake tensors.

Parameters have Hugging Face's names, so what is trained loads as a Llama. Two things depend on the caller:

| `fused`                  | norms                                            | rotary tables                       |
|--------------------------|--------------------------------------------------|-------------------------------------|
| True, the plan           | one kernel, which keeps its input                | made for each set of queries, keys  |
| False, `shardwise train` | in fp32, rounded, then multiplied by the weight  | made once per forward               |

They differ in bits and in bytes. `tests/train/test_train_model.py` holds the trained form to Hugging Face's Llama, and
`tests/planning/test_planning_estimate.py` the planned form to the plan's arithmetic.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from shardwise.models.dimensions import Dimensions, Experts, Latent

ROTARY_BASE = 10_000.0
NORM_EPSILON = 1e-5


class LlamaNorm(nn.RMSNorm):
    """RMSNorm in fp32, rounded before it is multiplied by the weight: the bits of Hugging Face's Llama."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * F.rms_norm(x.float(), (x.shape[-1],), eps=NORM_EPSILON).to(x.dtype)


def make_norm(of: Dimensions, fused: bool) -> nn.Module:
    """A norm over the hidden size. Only RMSNorm has a form that is not fused."""
    if of.norm_biases:
        return nn.LayerNorm(of.hidden)
    return nn.RMSNorm(of.hidden, NORM_EPSILON) if fused else LlamaNorm(of.hidden)


def rotation(length: int, head_dim: int, like: torch.Tensor) -> torch.Tensor:
    """Cosines and sines of every position, [2, length, head_dim], in the dtype and on the device of `like`."""
    exponents = torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32) / head_dim
    angles = torch.outer(torch.arange(length, device=like.device, dtype=torch.float32), ROTARY_BASE**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return torch.stack((angles.cos(), angles.sin())).to(like.dtype)


def rotate(x: torch.Tensor, tables: torch.Tensor | None) -> torch.Tensor:
    """Rotate the two halves of each head by the angle of the position; without `tables`, make them here."""
    tables = rotation(x.shape[-2], x.shape[-1], x) if tables is None else tables
    first, second = x.chunk(2, dim=-1)
    return x * tables[0] + torch.cat((-second, first), dim=-1) * tables[1]


class Attention(nn.Module):
    """Causal self-attention: grouped keys, optional norms of queries and keys, rotary unless positions are learned."""

    def __init__(self, of: Dimensions) -> None:
        super().__init__()
        self.of = of
        query, keys = of.heads * of.head_dim, of.kv_heads * of.head_dim
        self.q_proj = nn.Linear(of.hidden, query, of.qkv_bias)
        self.k_proj = nn.Linear(of.hidden, keys, of.qkv_bias)
        self.v_proj = nn.Linear(of.hidden, keys, of.qkv_bias)
        self.o_proj = nn.Linear(query, of.hidden, of.out_bias)
        self.q_norm = nn.RMSNorm(of.head_dim, NORM_EPSILON) if of.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(of.head_dim, NORM_EPSILON) if of.qk_norm else nn.Identity()

    def forward(self, x: torch.Tensor, tables: torch.Tensor | None) -> torch.Tensor:
        of, heads = self.of, (-1, self.of.head_dim)
        q = self.q_norm(self.q_proj(x).unflatten(-1, heads)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).unflatten(-1, heads)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, heads).transpose(1, 2)
        if not of.positions:
            q, k = rotate(q, tables), rotate(k, tables)
        grouped = of.kv_heads != of.heads
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        out: torch.Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return out


class LatentAttention(nn.Module):
    """Queries, keys and values through low-rank latents (DeepSeek's MLA)."""

    def __init__(self, of: Dimensions, latent: Latent) -> None:
        super().__init__()
        self.of, self.latent = of, latent
        query = of.heads * (latent.nope_dim + latent.rope_dim)
        if latent.query_rank:
            self.q_a_proj = nn.Linear(of.hidden, latent.query_rank, False)
            self.q_a_layernorm = nn.RMSNorm(latent.query_rank, NORM_EPSILON)
            self.q_b_proj = nn.Linear(latent.query_rank, query, False)
        else:
            self.q_proj = nn.Linear(of.hidden, query, False)
        self.kv_a_proj_with_mqa = nn.Linear(of.hidden, latent.key_rank + latent.rope_dim, False)
        self.kv_a_layernorm = nn.RMSNorm(latent.key_rank, NORM_EPSILON)
        self.kv_b_proj = nn.Linear(latent.key_rank, of.heads * (latent.nope_dim + latent.value_dim), False)
        self.o_proj = nn.Linear(of.heads * latent.value_dim, of.hidden, False)

    def forward(self, x: torch.Tensor, tables: torch.Tensor | None) -> torch.Tensor:
        batch, length, _ = x.shape
        heads, latent = self.of.heads, self.latent
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if latent.query_rank else self.q_proj(x)
        q = q.view(batch, length, heads, -1).transpose(1, 2)
        q_nope, q_rope = q.split((latent.nope_dim, latent.rope_dim), -1)
        compressed, k_rope = self.kv_a_proj_with_mqa(x).split((latent.key_rank, latent.rope_dim), -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(compressed)).view(batch, length, heads, -1).transpose(1, 2)
        k_nope, v = kv.split((latent.nope_dim, latent.value_dim), -1)
        k_rope = rotate(k_rope.unsqueeze(1), tables).expand(-1, heads, -1, -1)
        q, k = torch.cat((q_nope, rotate(q_rope, tables)), -1), torch.cat((k_nope, k_rope), -1)
        padded = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
        attended = F.scaled_dot_product_attention(q, k, padded, is_causal=True)[..., : latent.value_dim]
        out: torch.Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """Two matrices around a GELU or, gated, three around a SiLU."""

    def __init__(self, of: Dimensions, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(of.hidden, width, False) if of.gated else None
        self.up_proj = nn.Linear(of.hidden, width, of.out_bias)
        self.down_proj = nn.Linear(width, of.hidden, of.out_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.gelu(self.up_proj(x)) if self.gate_proj is None else F.silu(self.gate_proj(x)) * self.up_proj(x)
        out: torch.Tensor = self.down_proj(inner)
        return out


class Mixture(nn.Module):
    """Experts that process equal numbers of tokens, as under a balanced router. For dry runs: it mixes no values."""

    def __init__(self, of: Dimensions, experts: Experts) -> None:
        super().__init__()
        self.experts = experts
        count, hidden, width = experts.count, of.hidden, experts.width
        self.router = nn.Linear(hidden, count, False)
        self.gate = nn.Parameter(torch.randn(count, hidden, width) * hidden**-0.5)
        self.up = nn.Parameter(torch.randn(count, hidden, width) * hidden**-0.5)
        self.down = nn.Parameter(torch.randn(count, width, hidden) * width**-0.5)
        self.shared = FeedForward(of, experts.shared_width) if experts.shared_width else None

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


class DecoderLayer(nn.Module):
    """Attention and a feed-forward part, each behind a norm; with four norms, each between two (Gemma 2)."""

    def __init__(self, of: Dimensions, index: int, fused: bool) -> None:
        super().__init__()
        self.input_layernorm = make_norm(of, fused)
        self.self_attn = LatentAttention(of, of.latent) if of.latent else Attention(of)
        self.post_attention_layernorm = make_norm(of, fused)
        self.pre_feedforward_layernorm = make_norm(of, fused) if of.norms == 4 else None
        self.post_feedforward_layernorm = make_norm(of, fused) if of.norms == 4 else None
        is_dense = of.experts is None or index < of.experts.dense_layers
        self.mlp = FeedForward(of, of.width) if is_dense or of.experts is None else Mixture(of, of.experts)

    def forward(self, x: torch.Tensor, tables: torch.Tensor | None = None) -> torch.Tensor:
        # No name for what attention gives: it would stay in memory while the MLP computes.
        if self.pre_feedforward_layernorm is None or self.post_feedforward_layernorm is None:
            x = x + self.self_attn(self.input_layernorm(x), tables)
            mixed = self.mlp(self.post_attention_layernorm(x))
        else:
            x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), tables))
            mixed = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        out: torch.Tensor = x + mixed
        return out


class Decoder(nn.Module):
    """Tokens to hidden states: everything but the head."""

    def __init__(self, of: Dimensions, fused: bool) -> None:
        super().__init__()
        self.of = of
        self.head_dim, self._shares_tables = of.head_dim, not fused and not of.positions
        self.embed_tokens = nn.Embedding(of.vocabulary, of.hidden)
        self.embed_positions = nn.Embedding(of.positions, of.hidden) if of.positions else None
        self.layers = nn.ModuleList(DecoderLayer(of, index, fused) for index in range(of.layers))
        self.norm = make_norm(of, fused)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        if self.embed_positions is not None:
            x = x + self.embed_positions(torch.arange(tokens.shape[1], device=tokens.device))
        tables = rotation(tokens.shape[1], self.head_dim, x) if self._shares_tables else None
        for layer in self.layers:
            x = layer(x, tables)
        out: torch.Tensor = self.norm(x)
        return out


class CausalDecoder(nn.Module):
    """`model(tokens)` gives logits in fp32, `model(tokens, targets)` the mean loss of a batch."""

    def __init__(self, of: Dimensions, fused: bool = True) -> None:
        super().__init__()
        self.model = Decoder(of, fused)
        self.lm_head = nn.Linear(of.hidden, of.vocabulary, bias=False)
        if of.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.model(tokens)).float()
        return logits if targets is None else self.loss(logits, targets)

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Adapter(nn.Module):
    """A frozen matrix with a trained one of low rank beside it (LoRA)."""

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
                setattr(module, name, Adapter(child, rank))
