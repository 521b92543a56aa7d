"""What checkpoints keep rests on the host: the same bits, and as much as the formula says leaves the device."""

import pytest
import torch

import shardwise
from shardwise.models.built_in import GPT
from support import ranks
from support.training import digest, start, train_step

CHECKPOINTED = {"checkpointing": {"enabled": True}}
OFFLOADED = {"checkpointing": {"enabled": True, "offload": True}}


@ranks(1, 2)
@pytest.mark.parametrize("preset", ["zero2", "zero3", "zero3_offload"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_bits_as_on_the_device(rank, world_size, preset, precision):
    def run(more):
        engine = start("gpt", {"preset": preset, "precision": {"compute": precision}, **more})
        for step in range(3):
            train_step(engine, rank, step)
        result = digest(engine)
        engine.destroy()
        return result

    assert run(OFFLOADED) == run(CHECKPOINTED)


def gpt_engine(more):
    torch.manual_seed(0)
    model = GPT(64, 4, 4, 100, 33)
    return shardwise.initialize(model, torch.optim.AdamW(model.parameters()), {"preset": "zero2", **more})


@ranks(1)
def test_each_block_sends_its_input_down_and_gets_it_back(rank, world_size):
    engine = gpt_engine(OFFLOADED)
    data = torch.randint(100, (2, 33))
    for _ in range(2):
        engine.backward(engine(data))
        engine.step()
    moved = engine.report().moved_bytes
    size_bytes = 2 * 32 * 64 * 4
    assert dict(moved) == {"device to host": 2 * 4 * size_bytes, "host to device": 2 * 4 * size_bytes}
    assert engine.report().tier_bytes["host"] == 4 * size_bytes  # used again in the second step
    engine.destroy()


@ranks(1)
def test_a_graph_that_nobody_goes_back_through_gives_its_memory_back(rank, world_size):
    engine = gpt_engine(OFFLOADED)
    data = torch.randint(100, (2, 33))
    for _ in range(3):
        engine(data)
        engine.zero_grad()
    loss = engine(data)
    engine.backward(loss)
    assert engine.report().tier_bytes["host"] <= 8 * 2 * 32 * 64 * 4
    engine.destroy()


@ranks(1)
def test_inputs_of_many_lengths_take_what_the_longest_take(rank, world_size):
    engine = gpt_engine(OFFLOADED)
    for length in (9, 33, 17, 25, 33, 21):
        engine.backward(engine(torch.randint(100, (2, length))))
        engine.step()
    assert engine.report().tier_bytes["host"] <= 4 * 2 * 32 * 64 * 4
    engine.destroy()
    assert engine.report().tier_bytes.get("host", 0) == 0
