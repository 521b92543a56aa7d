"""Well-known models, dimensions only. `test_planning_catalog.py` holds their published parameter counts."""

from __future__ import annotations

import difflib

from shardwise.errors import ConfigError
from shardwise.models.dimensions import Dimensions, Experts, Latent


def _gpt2(name: str, hidden: int, layers: int, heads: int) -> Dimensions:
    return Dimensions(
        name, hidden, layers, heads, 50257, 4 * hidden, tied=True, gated=False, positions=1024, qkv_bias=True,
        out_bias=True, norm_biases=True,
    )  # fmt: skip


def _qwen25(name: str, hidden: int, layers: int, heads: int, kv: int, width: int, tied: bool) -> Dimensions:
    vocabulary = 151936 if hidden < 3584 else 152064
    return Dimensions(name, hidden, layers, heads, vocabulary, width, kv, tied=tied, qkv_bias=True)


def _qwen3(name: str, hidden: int, layers: int, heads: int, kv: int, width: int, tied: bool = False) -> Dimensions:
    return Dimensions(name, hidden, layers, heads, 151936, width, kv, 128, tied=tied, qk_norm=True)


def _qwen3_moe(name: str, hidden: int, layers: int, heads: int, width: int) -> Dimensions:
    experts = Experts(128, 8, width)
    return Dimensions(name, hidden, layers, heads, 151936, 3 * hidden, 4, 128, qk_norm=True, experts=experts)


def _gemma(name: str, hidden: int, layers: int, heads: int, kv: int, width: int, dim: int, norms: int) -> Dimensions:
    return Dimensions(name, hidden, layers, heads, 256000, width, kv, dim, tied=True, norms=norms)


_ALL = (
    _gpt2("gpt2", 768, 12, 12),
    _gpt2("gpt2-medium", 1024, 24, 16),
    _gpt2("gpt2-large", 1280, 36, 20),
    _gpt2("gpt2-xl", 1600, 48, 25),
    Dimensions("llama2-7b", 4096, 32, 32, 32000, 11008),
    Dimensions("llama2-13b", 5120, 40, 40, 32000, 13824),
    Dimensions("llama2-70b", 8192, 80, 64, 32000, 28672, 8),
    Dimensions("llama3-8b", 4096, 32, 32, 128256, 14336, 8),
    Dimensions("llama3-70b", 8192, 80, 64, 128256, 28672, 8),
    Dimensions("llama3-405b", 16384, 126, 128, 128256, 53248, 8),
    Dimensions("llama3.2-1b", 2048, 16, 32, 128256, 8192, 8, 64, tied=True),
    Dimensions("llama3.2-3b", 3072, 28, 24, 128256, 8192, 8, 128, tied=True),
    _qwen25("qwen2.5-0.5b", 896, 24, 14, 2, 4864, True),
    _qwen25("qwen2.5-1.5b", 1536, 28, 12, 2, 8960, True),
    _qwen25("qwen2.5-3b", 2048, 36, 16, 2, 11008, True),
    _qwen25("qwen2.5-7b", 3584, 28, 28, 4, 18944, False),
    _qwen25("qwen2.5-14b", 5120, 48, 40, 8, 13824, False),
    _qwen25("qwen2.5-32b", 5120, 64, 40, 8, 27648, False),
    _qwen25("qwen2.5-72b", 8192, 80, 64, 8, 29568, False),
    _qwen3("qwen3-0.6b", 1024, 28, 16, 8, 3072, True),
    _qwen3("qwen3-1.7b", 2048, 28, 16, 8, 6144, True),
    _qwen3("qwen3-4b", 2560, 36, 32, 8, 9728, True),
    _qwen3("qwen3-8b", 4096, 36, 32, 8, 12288),
    _qwen3("qwen3-14b", 5120, 40, 40, 8, 17408),
    _qwen3("qwen3-32b", 5120, 64, 64, 8, 25600),
    _qwen3_moe("qwen3-30b-a3b", 2048, 48, 32, 768),
    _qwen3_moe("qwen3-235b-a22b", 4096, 94, 64, 1536),
    Dimensions("mistral-7b", 4096, 32, 32, 32000, 14336, 8),
    Dimensions("mixtral-8x7b", 4096, 32, 32, 32000, 14336, 8, experts=Experts(8, 2, 14336)),
    Dimensions("mixtral-8x22b", 6144, 56, 48, 32768, 16384, 8, experts=Experts(8, 2, 16384)),
    _gemma("gemma-2b", 2048, 18, 8, 1, 16384, 256, 2),
    _gemma("gemma-7b", 3072, 28, 16, 16, 24576, 256, 2),
    _gemma("gemma2-2b", 2304, 26, 8, 4, 9216, 256, 4),
    _gemma("gemma2-9b", 3584, 42, 16, 8, 14336, 256, 4),
    _gemma("gemma2-27b", 4608, 46, 32, 16, 36864, 128, 4),
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
    """A model of the catalog by name, however it is spelt: `Llama-3-8B` is `llama3-8b`."""
    plain = {_plain(known): known for known in CATALOG}
    if _plain(name) in plain:
        return CATALOG[plain[_plain(name)]]
    nearest = difflib.get_close_matches(name.lower(), CATALOG, n=1)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    raise ConfigError(
        f"model {name!r} is not known{hint}: choose from {', '.join(CATALOG)}; or give a config.json, a model folder, "
        "file.py:function, or --params"
    )


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower().rpartition("/")[2] if letter.isalnum() or letter == ".")
