"""Ranks whose data take different ways through the model: the same gathers and reductions in one order, and exact."""

import os

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.agreement import agreement
from shardwise.observe import WireObserver
from shardwise.schedule.order import merged
from support import matrix, ranks
from support.training import digest

WIDTH, LAYERS = 16, 5


class Branching(nn.Module):
    """Layers that a batch enters in the order that it brings along, each a unit of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x, way, hands_on=False):
        x = torch.tanh(self.first(x))
        for index in way:
            # What one unit returns may be what the next is given: one tensor, on which both have hooks.
            x = self.layers[index](x) if hands_on else x + torch.tanh(self.layers[index](x))
        return self.last(x).square().mean()


class Experts(Branching):
    """The same with two units in each layer: the second list of modules lies inside the first."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS)
        )


# The layers that rank r enters in step s.
WAYS = {
    "all the same": lambda r, s: [0, 1, 2, 3, 4],
    "one skips the first": lambda r, s: [1, 2, 3, 4] if r == 1 else [0, 1, 2, 3, 4],
    "one skips the last": lambda r, s: [0, 1, 2] if r == 1 else [0, 1, 2, 3, 4],
    "one enters none": lambda r, s: [] if r == 1 else [0, 1, 2, 3, 4],
    "each its own": lambda r, s: [(r + s) % LAYERS],
    "layers dropped at random": lambda r, s: [i for i in range(LAYERS) if (i * 7 + r * 3 + s * 5) % 4],
    "an expert that wakes late": lambda r, s: [0, 4] if r == 1 and s >= 2 else [0, 1],
    "all change their ways": lambda r, s: [0, 1, 2] if s < 2 else [2, 3],
    "neighbours in another order": lambda r, s: [0, 2, 1, 3] if r == 1 else [0, 1, 2, 3],
}


def begin(preset, model=Branching, **config):
    model = model()
    runtime = {"min_unit_bytes": 1, **config.pop("runtime", {})}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return shardwise.initialize(model, optimizer, {"preset": preset, "runtime": runtime, **config})


def batch(rank, step):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def run(preset, way, rank, steps=4, hands_on=False, **config):
    engine = begin(preset, **config)
    for step in range(steps):
        engine.backward(engine(batch(rank, step), way(rank, step), hands_on))
        engine.step()
    found = digest(engine), {name: engine.full_param(name) for name, _ in engine.module.named_parameters()}
    engine.destroy()
    return found


def plainly(way, world_size, steps=4):
    """One process that adds the ranks' gradients in rank order."""
    model = Branching()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        sums = [torch.zeros_like(param) for param in model.parameters()]
        for rank in range(world_size):
            grads = torch.autograd.grad(
                model(batch(rank, step), way(rank, step)), model.parameters(), allow_unused=True
            )
            sums = [total if grad is None else total + grad for total, grad in zip(sums, grads, strict=True)]
        for param, total in zip(model.parameters(), sums, strict=True):
            param.grad = total / world_size
        optimizer.step()
    return dict(model.named_parameters())


@matrix({"world_size": [2, 3], "name": list(WAYS)}, strength=1)
@ranks()
def test_ranks_may_take_different_ways(rank, world_size, name):
    hashes = {}
    for preset in ("zero1", "zero2", "zero3"):
        hashes[preset], values = run(preset, WAYS[name], rank)
    assert len(set(hashes.values())) == 1, hashes
    for key, value in plainly(WAYS[name], world_size).items():
        torch.testing.assert_close(values[key], value.detach(), rtol=1e-5, atol=1e-6)


@ranks(2)
@pytest.mark.parametrize(
    "config",
    [
        {"runtime": {"prefetch": 0}},
        {"runtime": {"prefetch": 3}},
        {"checkpointing": {"enabled": True}},
        {"batch": {"accumulation": 2}},
    ],
    ids=str,
)
def test_ways_differ_under_any_schedule(rank, world_size, config):
    way = WAYS["layers dropped at random"]
    assert run("zero3", way, rank, **config)[0] == run("zero2", way, rank, **config)[0]


@ranks(2)
@pytest.mark.parametrize("name", ["an expert that wakes late", "all change their ways", "each its own"])
def test_members_with_several_units_may_wake_late(rank, world_size, name):
    config = {"model": Experts, "runtime": {"units": ["Linear"]}}
    assert run("zero3", WAYS[name], rank, **config)[0] == run("zero2", WAYS[name], rank, **config)[0]


@ranks(2)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_units_that_hand_on_their_outputs(rank, world_size, prefetch):
    """A rank that has left a unit reduces it before it gathers the next: other ranks may wait for that before they
    gather the same."""
    for name in ("each its own", "layers dropped at random", "an expert that wakes late"):
        config = {"hands_on": True, "runtime": {"prefetch": prefetch}}
        found = {run(preset, WAYS[name], rank, 3, **config)[0] for preset in ("zero2", "zero3")}
        assert len(found) == 1


class Member(nn.Module):
    """Units one after the other."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        for part in self.parts:
            x = torch.tanh(part(x))
        return x


class Members(Branching):
    """Members of several units, one after the other, in a checkpoint or without."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Member() for _ in range(4))

    def inside(self, x, way):
        for index in way:
            x = x + self.layers[index](x)
        return x

    def forward(self, x, way, reentrant=None):
        x = torch.tanh(self.first(x))
        x = self.inside(x, way) if reentrant is None else checkpoint(self.inside, x, way, use_reentrant=reentrant)
        return self.last(x).square().mean()


# The members that rank r enters in step s.
MEMBERS = {
    "each its own": lambda r, s: [r],
    "another in each step": lambda r, s: [(r + s) % 4],
    "a member that is first entered later": lambda r, s: [3] if r == 1 and s > 1 else [0],
    "two that met in none": lambda r, s: [[0, 2], [1, 2], [1, 3]][(r + s) % 3],
    "alone at first, together later": lambda r, s: [0, 1, 3] if s else [[0], [1, 2], [3]][r],
}


def assert_same_bits(rank, way, **arguments):
    found = set()
    for preset in ("zero2", "zero3"):
        engine = begin(preset, Members, runtime={"units": ["Linear"]})
        for step in range(4):
            engine.backward(engine(batch(rank, step), way(rank, step), **arguments))
            engine.step()
        found.add(digest(engine))
        engine.destroy()
    assert len(found) == 1


@ranks(2, 3)
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_members_of_several_units(rank, world_size, reentrant):
    """A rank reduces what it skips before it waits for its next gather, and keeps what others gather early."""
    for name in ("each its own", "another in each step", "a member that is first entered later"):
        assert_same_bits(rank, MEMBERS[name], reentrant=reentrant)


@ranks(2, 3)
def test_the_order_is_that_of_the_modules(rank, world_size):
    """Not that in which ranks happened to need them in the first pass, where other ways met."""
    for name in ("two that met in none", "alone at first, together later"):
        assert_same_bits(rank, MEMBERS[name])


class Passes(Branching):
    """Blocks that return their input where they are skipped."""

    class Block(nn.Linear):
        def forward(self, x, is_skipped):
            return x if is_skipped else torch.tanh(super().forward(x))

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Block(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x, way, hands_on=False):
        x = torch.tanh(self.first(x))
        for index, layer in enumerate(self.layers):
            x = layer(x, index not in way)
        return self.last(x).square().mean()


@ranks(2)
def test_blocks_that_return_their_input(rank, world_size):
    """One tensor is the output of several modules and the input of others: the backward goes through them in turn."""
    for name in ("one skips the first", "each its own", "layers dropped at random"):
        found = {run(preset, WAYS[name], rank, model=Passes)[0] for preset in ("zero1", "zero2", "zero3")}
        assert len(found) == 1


@ranks(2)
def test_ranks_may_evaluate_in_different_ways(rank, world_size):
    engine = begin("zero3")
    for step in range(3):
        engine.backward(engine(batch(rank, step), [0, 1, 2]))
        engine.step()
        with torch.no_grad():
            for way in ([rank], [rank, 3], []):
                assert engine(batch(rank, step), way).isfinite()
    engine.destroy()


@ranks(2)
def test_after_the_first_pass_nothing_is_asked(rank, world_size):
    engine = begin("zero3")
    way = WAYS["each its own"]
    sent = []
    for step in range(4):
        with WireObserver(control=lambda record: record.dtype != torch.float32) as wire:
            engine.backward(engine(batch(rank, step), way(rank, step)))
            engine.step()
        sent.append(wire.control_sent_bytes)
    assert sent[0] > sent[1] == sent[2] == sent[3] > 0  # the norm is all that is left
    engine.destroy()


def enter_twice_on_one_rank(engine, rank):
    engine(batch(rank, 2), [0, 1, 2, 0] if rank == 1 else [0, 1, 2])
    engine.full_param("last.weight")


@ranks(2, timeout=30)
def test_a_gather_out_of_turn_on_one_rank_is_named(rank, world_size):
    os.environ[agreement.POLL_VARIABLE] = "0.1"
    engine = begin("zero3")
    for step in range(2):
        engine.backward(engine(batch(rank, step), [0, 1, 2]))
        engine.step()
    with pytest.raises(shardwise.DisagreementError, match=r"rank 1: gather layers\.0"):
        enter_twice_on_one_rank(engine, rank)
    engine.destroy()


def test_merged_keeps_what_follows_what():
    assert merged([[0, 1, 2], [0, 1, 2]]) == [0, 1, 2]
    assert merged([[0, 2], [0, 1, 2]]) == [0, 1, 2]
    assert merged([[], [1, 0]]) == [1, 0]
    assert merged([[0, 1, 0, 2], [3]]) == [0, 1, 0, 2, 3]
    assert merged([[2, 0, 1, 2], [0, 1]]) == [2, 0, 1, 2]
    assert merged([[4, 5, 9], [0, 1, 2, 9]]) == [0, 1, 2, 4, 5, 9]
    assert merged([[0, 2, 1, 3], [0, 1, 2, 3]]) == [0, 1, 2, 3]
    assert merged([[], []]) == []
