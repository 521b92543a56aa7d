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


@ranks(2)
def test_buffers_that_are_views_get_the_values_of_rank_0(rank, world_size):
    """A collective writes as many bytes as there are elements, and an expanded tensor or a slice has fewer in a row."""
    model = torch.nn.Linear(WIDTH, WIDTH)
    model.register_buffer("expanded", torch.full((1, 3), rank + 1.0).expand(1 << 16, 3))
    model.register_buffer("slice", torch.full((4, 4), rank + 1.0)[:, 1:3])
    model.register_buffer("turned", (torch.arange(6.0).view(2, 3) + rank).t())
    around = model.slice._base
    engine = shardwise.initialize(model, make_sgd(model), "zero1")
    assert model.expanded.sum() == 3 << 16
    assert model.slice.sum() == 8
    assert torch.equal(model.turned, torch.arange(6.0).view(2, 3).t())
    assert (around.sum() - model.slice.sum()) == 8 * (rank + 1)
    engine.destroy()
