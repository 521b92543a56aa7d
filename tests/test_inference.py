"""`engine.inference()`: passes of a model in training that only compute, with weights that stay gathered."""

import copy

import pytest
import torch

import shardwise
from support import ranks
from support.training import digest
from test_stream import make, prompts

transformers = pytest.importorskip("transformers")


def engine_for(model, preset="zero3"):
    config = {"preset": preset, "precision": {"compute": "model"}}
    return shardwise.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config)


def train(engine, rank, steps=1):
    for step in range(steps):
        ids = prompts(100 * rank + step)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()


def tokens(model, rank, **more):
    ids = prompts(rank)
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, **more)


@ranks(1, 2, 3)
def test_the_same_bits_with_some_units_gathered(rank, world_size):
    check_bits(rank, world_size, "100KB")


@ranks(2)
@pytest.mark.parametrize("room", [0, None])
def test_the_same_bits_and_nothing_sent_for_what_stays(rank, world_size, room):
    check_bits(rank, world_size, room)


def check_bits(rank, world_size, room):
    torch.use_deterministic_algorithms(True)
    plain, used = (engine_for(make("dense")) for _ in range(2))
    for engine in (plain, used):
        train(engine, rank)
    alone = copy.deepcopy(plain.module)  # whole values, on all ranks
    expected = tokens(alone, rank)
    with used.inference(room):
        first = tokens(used.module, rank, synced_gpus=True)
        sent = used.comm.sent_bytes["gather"]
        again = tokens(used.module, rank, synced_gpus=True)
        if room is None or world_size == 1:
            assert used.comm.sent_bytes["gather"] == sent
        with pytest.raises(RuntimeError, match="leave its `with` block"):
            used.step()
    assert torch.equal(first, expected)
    assert torch.equal(again, expected)
    assert torch.equal(used.generate(prompts(rank), max_new_tokens=4, do_sample=False), expected)
    for engine in (plain, used):
        train(engine, rank, 2)
    assert digest(plain) == digest(used)
    for engine in (plain, used):
        engine.destroy()


@ranks(2)
def test_ranks_may_end_at_different_tokens(rank, world_size):
    engine = engine_for(make("dense"))
    ids = prompts(rank)
    alone = tokens(copy.deepcopy(engine.module), rank)
    stop = int(alone[0, ids.shape[1] + 1]) if rank == 0 else None  # rank 0 ends after two tokens
    found = engine.generate(ids[:1], max_new_tokens=6, do_sample=False, eos_token_id=stop, pad_token_id=0)
    assert found.shape[1] <= ids.shape[1] + 6
    engine.destroy()


def test_gradients_are_refused_inside():
    engine = engine_for(make("dense"))
    ids = prompts()
    with engine.inference(), torch.enable_grad(), pytest.raises(RuntimeError, match=r"inside engine.inference\(\)"):
        engine(input_ids=ids, labels=ids)
    train(engine, 0)
    engine.destroy()
