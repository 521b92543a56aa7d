"""What a pass needs on the device beside the weights: the keys and values of past tokens, activations, and logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwise.models.dimensions import Dimensions


@dataclass(frozen=True)
class WorkingMemory:
    """Bytes of one rank's passes, by what they are for."""

    cache_bytes: int = 0
    activation_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.cache_bytes + self.activation_bytes


def working_memory(
    of: Dimensions, batch: int, context: int, itemsize: int, cache_on_device: bool = True
) -> WorkingMemory:
    """The most that generating takes for `batch` sequences of up to `context` tokens, prompt included."""
    hidden, queries, keys = of.hidden, of.heads * of.head_dim, of.kv_heads * of.head_dim
    tokens = batch * context
    of_layer = 2 * tokens * keys * itemsize
    # A layer's cache grows by concatenation, so that its old and new tensors exist at once.
    cache_bytes = (of.layers if cache_on_device else 2) * of_layer + of_layer
    # The prompt passes a layer as a whole: the residual, its norm (in fp32 inside), queries, keys and values, their
    # rotated copies and the attention's result; then the three matrices of the feed-forward.
    attention = tokens * (2 * hidden * 4 + (4 * queries + 4 * keys + hidden) * itemsize)
    feed_forward = tokens * (2 * hidden + 4 * of.width) * itemsize
    logits = batch * of.vocabulary * (itemsize + 3 * 4)
    return WorkingMemory(cache_bytes, max(attention, feed_forward, logits) + tokens * hidden * itemsize)


def dimensions_in(config: Any) -> Dimensions | None:
    """Those that a model's configuration states in Hugging Face's terms; None if it has none of a decoder."""
    read = _reader(config)
    hidden, layers, heads = read("hidden_size"), read("num_hidden_layers"), read("num_attention_heads")
    if not (hidden and layers and heads):
        return None
    return Dimensions(
        name="",
        hidden=hidden,
        layers=layers,
        heads=heads,
        vocabulary=read("vocab_size") or 0,
        width=read("intermediate_size") or 4 * hidden,
        kv_heads=read("num_key_value_heads") or 0,
        head_dim=read("head_dim") or 0,
    )


def _reader(config: Any) -> Any:
    """A function that reads an integer of a configuration object or dictionary, or of its part for text."""
    values = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    text = values.get("text_config")
    inner = text if isinstance(text, dict) else getattr(text, "__dict__", {})

    def read(name: str) -> int | None:
        value = inner.get(name, values.get(name))
        if value is None:
            value = getattr(text if text is not None else config, name, None)  # a class may map names
        return value if isinstance(value, int) else None

    return read
