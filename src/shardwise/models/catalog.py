"""Dimensions by name, for well-known models, or from a Hugging Face `config.json`.

`tests/planning/test_planning_catalog.py` compares their parameter counts with the published ones.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import partial
from typing import Any

from shardwise.errors import ConfigError
from shardwise.models.dimensions import Dimensions, Experts, Latent

MODEL_TYPES = (
    "gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text",
    "deepseek_v2", "deepseek_v3",
)  # fmt: skip
"""The types that `from_config` counts correctly. Others may have biases, norms or gates that their keys do not show."""
_GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
}

_gpt2 = partial(Dimensions, tied=True, gated=False, positions=1024, qkv_bias=True, out_bias=True, norm_biases=True)
_qwen25 = partial(Dimensions, qkv_bias=True)
_qwen3 = partial(Dimensions, head_dim=128, qk_norm=True)
_gemma = partial(Dimensions, tied=True)
_ALL = (  # name, hidden, layers, heads, vocabulary, width, heads of keys and values, head_dim
    _gpt2("gpt2", 768, 12, 12, 50257, 3072),
    _gpt2("gpt2-medium", 1024, 24, 16, 50257, 4096),
    _gpt2("gpt2-large", 1280, 36, 20, 50257, 5120),
    _gpt2("gpt2-xl", 1600, 48, 25, 50257, 6400),
    Dimensions("llama2-7b", 4096, 32, 32, 32000, 11008),
    Dimensions("llama2-13b", 5120, 40, 40, 32000, 13824),
    Dimensions("llama2-70b", 8192, 80, 64, 32000, 28672, 8),
    Dimensions("llama3-8b", 4096, 32, 32, 128256, 14336, 8),
    Dimensions("llama3-70b", 8192, 80, 64, 128256, 28672, 8),
    Dimensions("llama3-405b", 16384, 126, 128, 128256, 53248, 8),
    Dimensions("llama3.2-1b", 2048, 16, 32, 128256, 8192, 8, 64, tied=True),
    Dimensions("llama3.2-3b", 3072, 28, 24, 128256, 8192, 8, 128, tied=True),
    _qwen25("qwen2.5-0.5b", 896, 24, 14, 151936, 4864, 2, tied=True),
    _qwen25("qwen2.5-1.5b", 1536, 28, 12, 151936, 8960, 2, tied=True),
    _qwen25("qwen2.5-3b", 2048, 36, 16, 151936, 11008, 2, tied=True),
    _qwen25("qwen2.5-7b", 3584, 28, 28, 152064, 18944, 4),
    _qwen25("qwen2.5-14b", 5120, 48, 40, 152064, 13824, 8),
    _qwen25("qwen2.5-32b", 5120, 64, 40, 152064, 27648, 8),
    _qwen25("qwen2.5-72b", 8192, 80, 64, 152064, 29568, 8),
    _qwen3("qwen3-0.6b", 1024, 28, 16, 151936, 3072, 8, tied=True),
    _qwen3("qwen3-1.7b", 2048, 28, 16, 151936, 6144, 8, tied=True),
    _qwen3("qwen3-4b", 2560, 36, 32, 151936, 9728, 8, tied=True),
    _qwen3("qwen3-8b", 4096, 36, 32, 151936, 12288, 8),
    _qwen3("qwen3-14b", 5120, 40, 40, 151936, 17408, 8),
    _qwen3("qwen3-32b", 5120, 64, 64, 151936, 25600, 8),
    _qwen3("qwen3-30b-a3b", 2048, 48, 32, 151936, 6144, 4, experts=Experts(128, 8, 768)),
    _qwen3("qwen3-235b-a22b", 4096, 94, 64, 151936, 12288, 4, experts=Experts(128, 8, 1536)),
    Dimensions("mistral-7b", 4096, 32, 32, 32000, 14336, 8),
    Dimensions("mixtral-8x7b", 4096, 32, 32, 32000, 14336, 8, experts=Experts(8, 2, 14336)),
    Dimensions("mixtral-8x22b", 6144, 56, 48, 32768, 16384, 8, experts=Experts(8, 2, 16384)),
    _gemma("gemma-2b", 2048, 18, 8, 256000, 16384, 1, 256),
    _gemma("gemma-7b", 3072, 28, 16, 256000, 24576, 16, 256),
    _gemma("gemma2-2b", 2304, 26, 8, 256000, 9216, 4, 256, norms=4),
    _gemma("gemma2-9b", 3584, 42, 16, 256000, 14336, 8, 256, norms=4),
    _gemma("gemma2-27b", 4608, 46, 32, 256000, 36864, 16, 128, norms=4),
    Dimensions(
        "deepseek-v2-lite", 2048, 27, 16, 102400, 10944, 16, 192,
        experts=Experts(64, 6, 1408, 2816, 1), latent=Latent(0, 512, 64, 128, 128),
    ),
    Dimensions(
        "deepseek-v3", 7168, 61, 128, 129280, 18432, 128, 192,
        experts=Experts(256, 8, 2048, 2048, 3), latent=Latent(1536, 512, 64, 128, 128),
    ),
)  # fmt: skip

CATALOG: dict[str, Dimensions] = {model.name: model for model in _ALL}


def find(name: str) -> Dimensions:
    """A known model by name. Case, dashes and a publisher's prefix do not matter: `Llama-3-8B` is `llama3-8b`."""
    by_key = {_key(known): model for known, model in CATALOG.items()}
    if _key(name) in by_key:
        return by_key[_key(name)]
    nearest = difflib.get_close_matches(name.lower(), CATALOG, n=1)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    raise ConfigError(
        f"model {name!r} is not known{hint}: choose from {', '.join(CATALOG)}; or give a config.json, a model folder, "
        "file.py:function, or --params"
    )


def _key(name: str) -> str:
    return "".join(letter for letter in name.lower().rpartition("/")[2] if letter.isalnum() or letter == ".")


def from_config(config: Mapping[str, Any], name: str) -> Dimensions:
    """The dimensions in a Hugging Face `config.json`. A ConfigError names a key that is missing or wrong."""
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ConfigError(
            f"{name}: the model_type {kind!r} is not known: choose from {', '.join(MODEL_TYPES)}; or write a "
            "function that builds the model, and give file.py:function"
        )
    is_gpt2 = kind == "gpt2"
    hidden, heads = _number(config, "hidden_size", name), _number(config, "num_attention_heads", name)
    experts, latent = _experts(config, name), _latent(config, name)
    if heads > hidden:
        raise ConfigError(f"{name}: {heads} attention heads do not fit a hidden_size of {hidden}: correct one of them")
    head_dim = latent.nope_dim + latent.rope_dim if latent else hidden // heads
    return Dimensions(
        name=name,
        hidden=hidden,
        layers=_number(config, "num_hidden_layers", name),
        heads=heads,
        vocabulary=_number(config, "vocab_size", name),
        width=_number(config, "intermediate_size", name, experts.width if experts else 4 * hidden),
        kv_heads=_number(config, "num_key_value_heads", name, heads),
        head_dim=_number(config, "head_dim", name, head_dim),
        tied=is_gpt2 or _flag(config, "tie_word_embeddings", name, kind.startswith("gemma")),
        gated=not is_gpt2,
        positions=_number(config, "n_positions", name, 1024) if is_gpt2 else 0,
        qkv_bias=is_gpt2 or _flag(config, "attention_bias", name, kind == "qwen2"),
        out_bias=is_gpt2,
        qk_norm=kind.startswith("qwen3") or kind == "gemma3_text",
        norms=4 if kind in ("gemma2", "gemma3_text") else 2,
        norm_biases=is_gpt2,
        experts=experts,
        latent=latent,
    )


def _experts(config: Mapping[str, Any], name: str) -> Experts | None:
    keys = ("num_local_experts", "num_experts", "n_routed_experts")
    count = next((_number(config, key, name) for key in keys if config.get(key)), 0)
    if not count:
        return None
    width = _number(config, "moe_intermediate_size", name, 0) or _number(config, "intermediate_size", name)
    return Experts(
        count,
        _number(config, "num_experts_per_tok", name, 1),
        width,
        shared_width=_number(config, "n_shared_experts", name, 0) * width,
        dense_layers=_number(config, "first_k_dense_replace", name, 0),
    )


def _latent(config: Mapping[str, Any], name: str) -> Latent | None:
    if not config.get("kv_lora_rank"):
        return None
    keys = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    ranks = [_number(config, key, name) for key in keys]
    return Latent(_number(config, "q_lora_rank", name, 0), *ranks)


def _flag(config: Mapping[str, Any], key: str, name: str, default: bool) -> bool:
    value = config.get(key)
    if not isinstance(value, bool | None):
        raise ConfigError(f"{name}: the key {key!r} is {value!r}, expected true or false")
    return default if value is None else value


def _number(config: Mapping[str, Any], key: str, name: str, default: int | None = None) -> int:
    """A positive whole number, or `default` if the key is absent, null or 0; a ConfigError names the key otherwise."""
    key = _GPT2_KEYS.get(key, key) if config["model_type"] == "gpt2" else key
    value = config.get(key)
    if not value and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**40:
        raise ConfigError(
            f"{name}: the key {key!r} is {value!r}, expected a whole number; "
            "is this the config.json of a decoder-only language model?"
        )
    return value
