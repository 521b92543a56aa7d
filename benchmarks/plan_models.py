"""Models for `plan_accuracy.py`, as `file.py:function`: small GPTs and decoders, with and without checkpointing."""

from shardwise.models.built_in import GPT, MLP, Batch, MakeBatch, ModelAndData, tokens, vectors
from shardwise.models.decoder import CausalDecoder
from shardwise.models.dimensions import Dimensions

SMALL = Dimensions("small", 192, 5, 6, 1000, 512, kv_heads=2)
"""A Llama in miniature."""


def gpt(recompute: bool = False) -> ModelAndData:
    """Activations count as much as weights."""
    return GPT(192, 5, 6, vocabulary=1000, length=128, recompute=recompute), tokens(4, 128, 1000)


def gpt_recomputed() -> ModelAndData:
    return gpt(recompute=True)


def tied(recompute: bool = False) -> ModelAndData:
    """Mostly one embedding, shared with the head."""
    return GPT(128, 3, 4, vocabulary=6000, length=64, tied=True, recompute=recompute), tokens(2, 64, 6000)


def tied_recomputed() -> ModelAndData:
    return tied(recompute=True)


def with_targets(make_tokens: MakeBatch) -> MakeBatch:
    """The batches of `make_tokens`, each text in two: all tokens but the last, and what follows each of them."""

    def make_batch(rank: int, step: int) -> Batch:
        tokens = make_tokens(rank, step)["tokens"]
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}

    return make_batch


def decoder() -> ModelAndData:
    """Grouped attention, rotary positions, gated MLP."""
    return CausalDecoder(SMALL), with_targets(tokens(4, 128, 1000))


def one_unit() -> ModelAndData:
    """A model that is a single unit."""
    return MLP(512, 1), vectors(64, 512)


def gpu_gpt(recompute: bool = False) -> ModelAndData:
    """0.2 B parameters, 4 x 1024 tokens."""
    return GPT(1024, 12, 16, vocabulary=32000, length=1024, recompute=recompute), tokens(4, 1024, 32000)


def gpu_gpt_recomputed() -> ModelAndData:
    return gpu_gpt(recompute=True)


def gpu_decoder() -> ModelAndData:
    """0.3 B parameters, 4 x 1024 tokens."""
    of = Dimensions("gpu", 1024, 16, 16, 32000, 4096, kv_heads=4)
    return CausalDecoder(of), with_targets(tokens(4, 1024, 32000))
