"""When the device's memory is full: an error that says what was held, what was asked for and what would hold less."""

import pytest
import torch
from torch import nn

from shardwise.sizes import format_bytes
from support import ranks
from support.training import start, train_step

MESSAGE = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.15 GiB"


class Full(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise torch.cuda.OutOfMemoryError(MESSAGE)


def fill(engine, where):
    """Make torch run out of memory in the engine's next forward, backward or step."""

    def raise_error(*args):
        raise torch.cuda.OutOfMemoryError(MESSAGE)

    layer: nn.Module = engine.module.layers[4]
    if where == "forward":
        layer.register_forward_hook(raise_error)
    elif where == "backward":
        layer.register_forward_hook(lambda module, args, output: Full.apply(output))
    else:
        engine.register_grad_hook(raise_error)


@ranks(2)
@pytest.mark.parametrize("where", ["forward", "backward", "step"])
@pytest.mark.parametrize("preset", ["zero0", "zero3"])
def test_the_message_says_what_was_held_and_what_would_hold_less(rank, world_size, where, preset):
    engine = start("mlp", {"preset": preset})
    train_step(engine, rank, 0)
    fill(engine, where)
    with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
        train_step(engine, rank, 1)
    text = str(caught.value)
    assert MESSAGE in text
    assert "asked for 2.50 GiB" in text
    assert "weights " in text
    assert "optim " in text
    assert ("preset zero1: " in text) == (preset == "zero0")
    assert ("preset zero3: " in text) == (preset == "zero0")
    assert ("runtime.prefetch 0" in text) == (preset == "zero3")
    assert "checkpointing.enabled true" in text
    assert "micro-batch" in text
    engine.destroy()


def test_what_is_on_already_is_not_advised():
    engine = start("mlp", {"preset": "zero3", "checkpointing": {"enabled": True}})
    fill(engine, "forward")
    with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
        train_step(engine, 0, 0)
    assert "checkpointing.enabled" not in str(caught.value)
    engine.destroy()


def test_resting_bytes_are_those_of_the_table():
    engine = start("mlp", {"preset": "zero0", "precision": {"compute": "bf16"}})
    fill(engine, "forward")
    with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
        train_step(engine, 0, 0)
    parameters = sum(unit.layout.numel for unit in engine.units)
    # One rank: everything but the 16-bit copy that sharded weights do without.
    assert f"preset zero3: {format_bytes(14 * parameters)} at rest" in str(caught.value)
    engine.destroy()
