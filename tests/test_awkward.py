"""Models as they come: every case of `support.awkward` trains as in plain torch, with the same bits in every stage."""

import pytest
import torch

import shardwise
from support import ranks
from support.awkward import CASES, WIDTH
from support.training import digest, make_sgd

STAGES = ["zero0", "zero1", "zero2", "zero3"]
STEPS = 3


def inputs(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, WIDTH, generator=generator).requires_grad_()


def build(name):
    torch.manual_seed(5)
    return CASES[name].build()


def train(name, preset, rank):
    """Train under an engine; the hash of everything, and the weights."""
    model, loss = build(name), CASES[name].loss
    engine = shardwise.initialize(model, make_sgd(model), {"preset": preset, "gradients": {"order": "sharded"}})
    for step in range(STEPS):
        x = inputs(rank, step)
        engine.backward(loss(model, engine(x), x))
        engine.step()
    seen = digest(engine), {name: engine.full_param(name) for name, _ in model.named_parameters()}
    engine.destroy()
    return seen


def train_plainly(name, world_size):
    """Train in one process, with the mean of the ranks' losses."""
    model, loss = build(name), CASES[name].loss
    optimizer = make_sgd(model)
    for step in range(STEPS):
        for rank in range(world_size):
            x = inputs(rank, step)
            (loss(model, model(x), x) / world_size).backward()
        optimizer.step()
        # Parameters that no rank used are reduced as zeros: momentum still moves them.
        optimizer.zero_grad(set_to_none=False)
    return model


@ranks(2)
@pytest.mark.parametrize("name", CASES)
def test_trains_as_in_plain_torch_with_the_same_bits_in_every_stage(rank, world_size, name):
    hashes = []
    for preset in STAGES:
        sha, weights = train(name, preset, rank)
        hashes.append(sha)
    assert len(set(hashes)) == 1, dict(zip(STAGES, hashes, strict=True))
    if name != "Skips":  # whose one process would count the calls of both ranks
        for key, param in train_plainly(name, world_size).named_parameters():
            torch.testing.assert_close(weights[key], param.detach().to(weights[key]), rtol=1e-4, atol=1e-6)
