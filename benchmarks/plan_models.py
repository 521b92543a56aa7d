"""Models for `plan_accuracy.py`, as `file.py:function`: small GPTs and decoders, with and without checkpointing."""

from torch import nn

from shardwise.models.built_in import GPT, MLP, MakeBatch, _tokens, _vectors
from shardwise.models.decoder import Decoder
from shardwise.models.dimensions import Dimensions

Workload = tuple[nn.Module, MakeBatch]
SMALL = Dimensions("small", 192, 5, 6, 1000, 512, kv_heads=2)
"""A Llama in miniature."""


def gpt(recompute: bool = False) -> Workload:
    """Activations count as much as weights."""
    return GPT(192, 5, 6, vocabulary=1000, length=128, recompute=recompute), _tokens(4, 128, 1000)


def gpt_recomputed() -> Workload:
    return gpt(recompute=True)


def tied(recompute: bool = False) -> Workload:
    """Mostly one embedding, shared with the head."""
    return GPT(128, 3, 4, vocabulary=6000, length=64, tied=True, recompute=recompute), _tokens(2, 64, 6000)


def tied_recomputed() -> Workload:
    return tied(recompute=True)


def decoder() -> Workload:
    """Grouped attention, rotary positions, gated MLP."""
    return Decoder(SMALL), _tokens(4, 128, 1000)


def one_unit() -> Workload:
    """A model that is a single unit."""
    return MLP(512, 1), _vectors(64, 512)


def gpu_gpt(recompute: bool = False) -> Workload:
    """0.2 B parameters, 4 x 1024 tokens."""
    return GPT(1024, 12, 16, vocabulary=32000, length=1024, recompute=recompute), _tokens(4, 1024, 32000)


def gpu_gpt_recomputed() -> Workload:
    return gpu_gpt(recompute=True)


def gpu_decoder() -> Workload:
    """0.3 B parameters, 4 x 1024 tokens."""
    of = Dimensions("gpu", 1024, 16, 16, 32000, 4096, kv_heads=4)
    return Decoder(of), _tokens(4, 1024, 32000)
