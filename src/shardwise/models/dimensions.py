"""What a decoder is made of, in numbers, and how many parameters that makes. No tensors.

Read from a Hugging Face `config.json` with `from_config`; well-known models are in `catalog`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.errors import ConfigError

MODEL_TYPES = (
    "gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text",
    "deepseek_v2", "deepseek_v3",
)  # fmt: skip
"""What `from_config` counts rightly. Others may have biases, other norms or no gate, which their keys do not say."""


@dataclass(frozen=True)
class Experts:
    """A mixture in the place of a layer's MLP: `count` of width `width`, of which `used` serve a token."""

    count: int
    used: int
    width: int
    shared_width: int = 0
    dense_layers: int = 0


@dataclass(frozen=True)
class Latent:
    """Attention through low-rank latents (DeepSeek's MLA)."""

    query_rank: int
    key_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int


@dataclass(frozen=True)
class Dimensions:
    """A decoder-only transformer.

    positions      rows of a table of learned positions; 0 with rotary ones
    gated          an MLP of three matrices (gate, up, down) instead of two
    norms          normalisations in a layer
    norm_biases    norms with a bias (LayerNorm), else one vector (RMSNorm)
    """

    name: str
    hidden: int
    layers: int
    heads: int
    vocabulary: int
    width: int
    kv_heads: int = 0
    head_dim: int = 0
    tied: bool = False
    gated: bool = True
    positions: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    norms: int = 2
    norm_biases: bool = False
    experts: Experts | None = None
    latent: Latent | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden // self.heads)

    def linears(self) -> dict[str, tuple[int, int, int]]:
        """The matrices of a layer that adapters may sit on: inputs, outputs, how many. Experts not included."""
        query, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.latent is not None:
            attention = self._latent_linears(self.latent)
        else:
            attention = {
                "q_proj": (self.hidden, query, 1),
                "k_proj": (self.hidden, keys, 1),
                "v_proj": (self.hidden, keys, 1),
                "o_proj": (query, self.hidden, 1),
            }
        mlp = {"up_proj": (self.hidden, self.width, 1), "down_proj": (self.width, self.hidden, 1)}
        if self.gated:
            mlp["gate_proj"] = (self.hidden, self.width, 1)
        return attention | mlp

    def _latent_linears(self, latent: Latent) -> dict[str, tuple[int, int, int]]:
        query = self.heads * (latent.nope_dim + latent.rope_dim)
        queries = {"q_proj": (self.hidden, query, 1)}
        if latent.query_rank:
            queries = {"q_a_proj": (self.hidden, latent.query_rank, 1), "q_b_proj": (latent.query_rank, query, 1)}
        return queries | {
            "kv_a_proj_with_mqa": (self.hidden, latent.key_rank + latent.rope_dim, 1),
            "kv_b_proj": (latent.key_rank, self.heads * (latent.nope_dim + latent.value_dim), 1),
            "o_proj": (self.heads * latent.value_dim, self.hidden, 1),
        }

    def _attention_numel(self) -> int:
        names = [name for name in self.linears() if name not in ("up_proj", "down_proj", "gate_proj")]
        total = sum(self.linears()[name][0] * self.linears()[name][1] for name in names)
        if self.qkv_bias:
            total += (self.heads + 2 * self.kv_heads) * self.head_dim
        if self.out_bias:
            total += self.hidden
        if self.qk_norm:
            total += 2 * self.head_dim
        if self.latent is not None:
            total += self.latent.query_rank + self.latent.key_rank
        return total

    def _mlp_numel(self, width: int) -> int:
        biases = width + self.hidden if self.out_bias else 0
        return (3 if self.gated else 2) * self.hidden * width + biases

    def _norm_numel(self) -> int:
        return self.hidden * (2 if self.norm_biases else 1)

    def layer_numel(self, index: int = -1) -> int:
        """Parameters of a layer; of the last by default."""
        total = self._attention_numel() + self.norms * self._norm_numel()
        experts = self.experts
        if experts is None or index in range(experts.dense_layers):
            return total + self._mlp_numel(self.width)
        routed = experts.count * (3 * self.hidden * experts.width + self.hidden)
        return total + routed + 3 * self.hidden * experts.shared_width

    @property
    def embedding_numel(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Everything, tied weights once."""
        outside = self.embedding_numel * (1 if self.tied else 2) + self.positions * self.hidden + self._norm_numel()
        return outside + sum(self.layer_numel(index) for index in range(self.layers))

    @property
    def active_parameters(self) -> int:
        """Those that a token passes."""
        experts = self.experts
        if experts is None:
            return self.parameters
        idle = (experts.count - experts.used) * 3 * self.hidden * experts.width
        return self.parameters - idle * (self.layers - experts.dense_layers)

    def lora_numel(self, rank: int, targets: tuple[str, ...]) -> int:
        """Parameters of adapters of `rank` on the matrices named `targets` in every layer."""
        known = self.linears()
        unknown = [name for name in targets if name not in known]
        if unknown:
            raise ConfigError(f"LoRA target {unknown[0]!r} is not known: choose from {', '.join(known)}")
        each = sum(rank * (known[name][0] + known[name][1]) * known[name][2] for name in targets)
        return self.layers * each


def from_config(config: Mapping[str, Any], name: str) -> Dimensions:
    """The dimensions in a Hugging Face `config.json`; a ConfigError names the key that is missing or not understood."""
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ConfigError(
            f"{name}: the model_type {kind!r} is not known: choose from {', '.join(MODEL_TYPES)}; or build the "
            "model in a function of yours and name that, file.py:function"
        )
    if kind == "gpt2":
        return _from_gpt2(config, name)
    hidden, heads = _need(config, "hidden_size", name), _need(config, "num_attention_heads", name)
    experts, latent = _experts(config, name), _latent(config, name)
    head_dim = latent.nope_dim + latent.rope_dim if latent else hidden // heads
    return Dimensions(
        name=name,
        hidden=hidden,
        layers=_need(config, "num_hidden_layers", name),
        heads=heads,
        vocabulary=_need(config, "vocab_size", name),
        width=_may(config, "intermediate_size", name, experts.width if experts else 4 * hidden),
        kv_heads=_may(config, "num_key_value_heads", name, heads),
        head_dim=_may(config, "head_dim", name, head_dim),
        tied=bool(config.get("tie_word_embeddings", kind.startswith("gemma"))),
        qkv_bias=bool(config.get("attention_bias", kind == "qwen2")),
        qk_norm=kind.startswith("qwen3") or kind == "gemma3_text",
        norms=4 if kind in ("gemma2", "gemma3_text") else 2,
        experts=experts,
        latent=latent,
    )


def _from_gpt2(config: Mapping[str, Any], name: str) -> Dimensions:
    hidden = _need(config, "n_embd", name)
    return Dimensions(
        name=name,
        hidden=hidden,
        layers=_need(config, "n_layer", name),
        heads=_need(config, "n_head", name),
        vocabulary=_need(config, "vocab_size", name),
        width=_may(config, "n_inner", name, 4 * hidden),
        tied=True,
        gated=False,
        positions=_may(config, "n_positions", name, 1024),
        qkv_bias=True,
        out_bias=True,
        norm_biases=True,
    )


def _experts(config: Mapping[str, Any], name: str) -> Experts | None:
    keys = ("num_local_experts", "num_experts", "n_routed_experts")
    count = next((_need(config, key, name) for key in keys if config.get(key)), 0)
    if not count:
        return None
    width = _may(config, "moe_intermediate_size", name, 0) or _need(config, "intermediate_size", name)
    return Experts(
        count,
        _may(config, "num_experts_per_tok", name, 1),
        width,
        shared_width=_may(config, "n_shared_experts", name, 0) * width,
        dense_layers=_may(config, "first_k_dense_replace", name, 0),
    )


def _latent(config: Mapping[str, Any], name: str) -> Latent | None:
    if not config.get("kv_lora_rank"):
        return None
    keys = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    ranks = [_need(config, key, name) for key in keys]
    return Latent(_may(config, "q_lora_rank", name, 0), *ranks)


def _may(config: Mapping[str, Any], key: str, name: str, default: int) -> int:
    """The same, but `default` where it is absent, null or 0."""
    return _need(config, key, name) if config.get(key) else default


def _need(config: Mapping[str, Any], key: str, name: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"{name}: the key {key!r} is {value!r}, expected a whole number; "
            "is this the config.json of a decoder-only language model?"
        )
    return value
