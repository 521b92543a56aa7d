"""The model that `shardwise train` trains: a decoder with the names and the arithmetic of Llama.

So what is exported loads wherever Llama checkpoints load, and the same class serves one million parameters and seven
billion.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shardwise.train.shape import Shape

ROTARY_BASE = 10_000.0
NORM_EPSILON = 1e-5


class Norm(nn.Module):
    """Root-mean-square norm, computed in fp32."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * F.rms_norm(x.float(), (x.shape[-1],), eps=NORM_EPSILON).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(shape.hidden, shape.hidden, bias=False) for _ in range(4)
        )

    def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        q, k, v = (self._split(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        attended = F.scaled_dot_product_attention(rotate(q, turn), rotate(k, turn), v, is_causal=True)
        out: torch.Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:-1], self.heads, -1).transpose(1, 2)


class MLP(nn.Module):
    """Two thirds of the classic width, with a gate."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One transformer layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden)
        self.mlp = MLP(shape)

    def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turn)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Everything but the head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_size = shape.hidden // shape.heads
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        turn = rotation(tokens.shape[1], self.head_size, x)
        for layer in self.layers:
            x = layer(x, turn)
        out: torch.Tensor = self.norm(x)
        return out


class HubConfig:
    """What makes `config.json` of an export."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape

    def to_json_string(self) -> str:
        return json.dumps(hub_config(self._shape), indent=1) + "\n"


class LanguageModel(nn.Module):
    """`model(tokens)` gives logits, `model(tokens, targets)` the mean loss of a batch."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.config = HubConfig(shape)
        self.model = Decoder(shape)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.apply(initialise)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.model(tokens)).float()
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def initialise(module: nn.Module) -> None:
    """Small normal weights, so that the first loss is that of a uniform guess."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def rotation(length: int, head_size: int, like: torch.Tensor) -> torch.Tensor:
    """Cosines and sines of every position, [2, length, head_size], in the dtype and on the device of `like`."""
    exponents = torch.arange(0, head_size, 2, device=like.device, dtype=torch.float32) / head_size
    angles = torch.outer(torch.arange(length, device=like.device, dtype=torch.float32), ROTARY_BASE**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return torch.stack((angles.cos(), angles.sin())).to(like.dtype)


def rotate(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Turn the two halves of each head against each other, by the angle of the position."""
    first, second = x.chunk(2, dim=-1)
    return x * turn[0] + torch.cat((-second, first), dim=-1) * turn[1]


def hub_config(shape: Shape) -> dict[str, Any]:
    """The config.json with which Hugging Face's Llama reads the exported weights."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": NORM_EPSILON,
        "rope_theta": ROTARY_BASE,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
