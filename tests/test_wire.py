"""Contract C3: bytes sent per rank and step, counted from outside, equal the formulas to the byte."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from shardwise.observe import WireObserver
from support import matrix, ranks
from support.training import start, train_step


def control(record):
    """The partial norms: a few fp64 values of every rank."""
    return record.dtype == torch.float64


def sent_in_a_step(engine, rank, step=1):
    with WireObserver(control=control) as wire:
        train_step(engine, rank, step)
        for unit in engine.units:
            unit.weights.wait_gather()
    return wire


def expected_bytes(engine, preset, order, accumulation, item, world_size):
    """(K+1) or 2 times the trainable weights; stage 3: 3K times, plus frozen, less re-gathers.

    What the backward begins with (the last unit, the one gathered ahead beside it, the root) is not gathered again;
    a unit that no forward enters is never gathered.
    """
    share = (world_size - 1) / world_size
    trainable = sum(unit.layout.numel for unit in engine.units if unit.is_trainable)
    held = 4 if accumulation > 1 else item
    if preset == "zero3":
        entered = [unit for unit in engine.units if unit.name != "unused"]
        inside = [unit for unit in entered if unit.spec.runs[0] != ("",)]
        gathers = sum(unit.layout.numel for unit in entered) + sum(unit.layout.numel for unit in inside[:-2])
        reduced = trainable * (accumulation * item if order == "sharded" else held)
        return (reduced + accumulation * item * gathers) * share
    reduced = accumulation * item if order == "sharded" else held
    # Stage 0 brings the reduced gradients to all ranks as they are held, the others the updated weights.
    gathered = held if preset == "zero0" else item
    return trainable * (reduced + gathered) * share


@matrix(
    {
        "preset": ["zero0", "zero1", "zero2", "zero3"],
        "precision": ["fp32", "bf16"],
        "accumulation": [1, 3],
        "order": ["local", "sharded"],
        "world_size": [1, 2, 3, 4],
        "model": ["mlp", "gpt", "odd"],
        "min_unit_bytes": [1, None],
    },
)
@ranks()
def test_bytes_sent_equal_the_formula(rank, world_size, preset, precision, accumulation, order, model, min_unit_bytes):
    config = {
        "preset": preset,
        "precision": {"compute": precision},
        "batch": {"accumulation": accumulation},
        "gradients": {"order": order, "clip_norm": 1.0},
        "runtime": {"min_unit_bytes": min_unit_bytes},
    }
    engine = start(model, config)
    train_step(engine, rank, 0)
    before = engine.report().sent_bytes
    wire = sent_in_a_step(engine, rank)
    item = 4 if precision == "fp32" else 2
    assert wire.sent_bytes == expected_bytes(engine, preset, order, accumulation, item, world_size)
    counted = {kind: sent - before.get(kind, 0) for kind, sent in engine.report().sent_bytes.items()}
    assert counted.get("gather", 0) + counted.get("reduce", 0) == wire.sent_bytes
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("reentrant", [False, True, None])
def test_checkpointing_sends_nothing_more(rank, world_size, reentrant):
    plain = start("gpt", {"preset": "zero3"})
    train_step(plain, rank, 0)
    expected = sent_in_a_step(plain, rank).sent_bytes
    plain.destroy()

    config = {"preset": "zero3", "checkpointing": {"enabled": reentrant is None}}
    engine = start("gpt", config)
    if reentrant is not None:
        engine.module.blocks = torch.nn.ModuleList(Checkpointed(block, reentrant) for block in engine.module.blocks)
    train_step(engine, rank, 0)
    assert sent_in_a_step(engine, rank).sent_bytes == expected
    engine.destroy()


class Checkpointed(torch.nn.Module):
    def __init__(self, block, reentrant):
        super().__init__()
        self.block = block
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


@ranks(2)
def test_the_loop_of_no_sync_sends_once(rank, world_size):
    from support.training import make_batch

    engine = start("mlp", {"preset": "zero1"})
    train_step(engine, rank, 0)
    with WireObserver(control=control) as wire:
        with engine.no_sync():
            for micro in range(2):
                engine.backward(engine(make_batch(engine.module, rank, micro)))
        engine.backward(engine(make_batch(engine.module, rank, 2)))
        engine.step()
        for unit in engine.units:
            unit.weights.wait_gather()
    total = sum(unit.layout.numel for unit in engine.units)
    assert wire.sent_bytes == 2 * total * 4 * (world_size - 1) / world_size
    engine.destroy()
