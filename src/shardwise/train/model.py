"""The model that `shardwise train` trains: the decoder of `shardwise.models` as a Llama, with what its export needs."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from shardwise.models.decoder import NORM_EPSILON, ROTARY_BASE, CausalDecoder
from shardwise.train.job import Shape


class HubConfig(dict[str, Any]):
    """The config.json with which Hugging Face's Llama reads the exported weights."""

    def to_json_string(self) -> str:
        return json.dumps(self, indent=1) + "\n"


class LanguageModel(CausalDecoder):
    """A Llama of a given shape with fresh weights; an export of it loads wherever Llama checkpoints load."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape.dimensions, fused=False)
        self.config = hub_config(shape)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)  # small: the first loss is that of a uniform guess


def hub_config(shape: Shape) -> HubConfig:
    """The configuration of a model of this shape."""
    return HubConfig(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.dimensions.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.context,
        rms_norm_eps=NORM_EPSILON,
        rope_theta=ROTARY_BASE,
        hidden_act="silu",
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
