"""The dimensions of a decoder-only transformer, and its parameter counts. Integers only, no tensors.

`catalog` gives the dimensions of a known model or of a Hugging Face `config.json`; `decoder` builds the model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.errors import ConfigError

Linears = dict[str, tuple[int, int]]
"""Inputs and outputs of matrices, by name."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts instead of a layer's MLP: `count` experts of width `width`; each token uses `used` of them.

    All tokens also pass an MLP of `shared_width`. The first `dense_layers` layers have a plain MLP.
    """

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

    width          the inner width of an MLP
    gated          an MLP has three matrices (gate, up, down) instead of two
    positions      rows of the table of learned positions; 0 if positions are rotary
    norms          norms in a layer: 2, or 4 as in Gemma 2
    norm_biases    norms have a bias (LayerNorm); otherwise only a weight (RMSNorm)
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

    def part(self, count: int) -> Dimensions:
        """What one of `count` ranks holds under tensor parallelism, the first of them where parts are not equal: some
        heads and channels of every layer and rows of the embedding; norms and learned positions whole.

        >>> Dimensions("a", hidden=512, layers=2, heads=8, vocabulary=1000, width=2048, kv_heads=2).part(2).kv_heads
        1
        """
        if count > 1 and (self.latent or self.experts):
            raise ConfigError(
                "models with latent attention or experts have no tensor-parallel plan: pass one of your own"
            )
        check_heads(self.heads, count)
        check_heads(self.kv_heads, count)
        width, vocabulary = -(-self.width // count), -(-self.vocabulary // count)
        heads, kv_heads = self.heads // count, self.kv_heads // count
        return replace(self, heads=heads, kv_heads=kv_heads, width=width, vocabulary=vocabulary)

    def linears(self) -> Linears:
        """The matrices of a layer that can have adapters. Experts cannot."""
        return self._attention() | self._mlp(self.width)

    def _attention(self) -> Linears:
        hidden, latent = self.hidden, self.latent
        if latent is None:
            query, keys = (hidden, self.heads * self.head_dim), (hidden, self.kv_heads * self.head_dim)
            return {"q_proj": query, "k_proj": keys, "v_proj": keys, "o_proj": query[::-1]}
        query_size = self.heads * (latent.nope_dim + latent.rope_dim)
        queries: Linears = {"q_proj": (hidden, query_size)}
        if latent.query_rank:
            queries = {"q_a_proj": (hidden, latent.query_rank), "q_b_proj": (latent.query_rank, query_size)}
        return queries | {
            "kv_a_proj_with_mqa": (hidden, latent.key_rank + latent.rope_dim),
            "kv_b_proj": (latent.key_rank, self.heads * (latent.nope_dim + latent.value_dim)),
            "o_proj": (self.heads * latent.value_dim, hidden),
        }

    def _mlp(self, width: int) -> Linears:
        up = dict.fromkeys(("up_proj", "gate_proj")[: 1 + self.gated], (self.hidden, width))
        return up | {"down_proj": (width, self.hidden)}

    def layer_numel(self, index: int = -1) -> int:
        """Parameters of a layer, by default of the last."""
        total = _numel(self._attention()) + self.norms * self._norm_numel
        total += self.qkv_bias * (self.heads + 2 * self.kv_heads) * self.head_dim + self.out_bias * self.hidden
        total += self.qk_norm * 2 * self.head_dim
        if self.latent is not None:
            total += self.latent.query_rank + self.latent.key_rank
        experts = self.experts
        if experts is None or index in range(experts.dense_layers):
            return total + _numel(self._mlp(self.width)) + self.out_bias * (self.width + self.hidden)
        routed = experts.count * (_numel(self._mlp(experts.width)) + self.hidden)
        return total + routed + _numel(self._mlp(experts.shared_width))

    @property
    def _norm_numel(self) -> int:
        return self.hidden * (1 + self.norm_biases)

    @property
    def embedding_numel(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters; tied weights count once."""
        outside = self.embedding_numel * (1 if self.tied else 2) + self.positions * self.hidden + self._norm_numel
        return outside + sum(self.layer_numel(index) for index in range(self.layers))

    @property
    def active_parameters(self) -> int:
        """The parameters that one token uses."""
        experts = self.experts
        if experts is None:
            return self.parameters
        idle = (experts.count - experts.used) * _numel(self._mlp(experts.width))
        return self.parameters - idle * (self.layers - experts.dense_layers)

    def lora_numel(self, rank: int, targets: tuple[str, ...]) -> int:
        """Parameters of adapters of `rank` on the matrices named `targets` in every layer."""
        known = self.linears()
        unknown = [name for name in targets if name not in known]
        if unknown:
            raise ConfigError(f"LoRA target {unknown[0]!r} is not known: choose from {', '.join(known)}")
        return self.layers * sum(rank * sum(known[name]) for name in targets)


def check_heads(heads: int, parts: int) -> None:
    """Raise a ConfigError unless the heads of a model can be cut into equal parts."""
    if heads % parts:
        raise ConfigError(f"{heads} attention heads cannot be cut into {parts} parts: take a tp that divides them")


def _numel(linears: Linears) -> int:
    return sum(inputs * outputs for inputs, outputs in linears.values())
