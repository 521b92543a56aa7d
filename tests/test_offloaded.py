"""`engine.offloaded()`: what rests on the device moves to the host and back, and no bit of the training changes."""

import pytest
import torch

import shardwise
from shardwise.engine.residency import states_on_host
from shardwise.offload.pinned import HostMemory
from shardwise.unit.weights import WeightsState
from support import matrix, ranks
from support.training import PRECISIONS, digest, make_batch, start, train_step

PRESETS = ["zero0", "zero1", "zero3", "zero3_hybrid", "zero2_offload", "zero3_offload"]


@ranks()
@matrix(
    {"world_size": [1, 2, 3], "preset": PRESETS, "precision": list(PRECISIONS), "model": ["gpt", "odd", "tied"]},
)
def test_training_goes_on_with_the_same_bits(rank, world_size, preset, precision, model):
    config = {"preset": preset, "precision": PRECISIONS[precision]}
    engine, expected = start(model, config), []
    shardwise.ema(engine)
    for step in range(4):
        train_step(engine, rank, step)
        expected.append(digest(engine))
    engine.destroy()
    engine = start(model, config)
    shardwise.ema(engine)
    batch = make_batch(engine.module, rank, 0)
    for step in range(4):
        train_step(engine, rank, step)
        with torch.no_grad():
            loss = engine(batch)
        before = engine.report().tier_bytes
        with engine.offloaded():
            tiers = engine.report().tier_bytes
            assert tiers.get("device", 0) == gathered_bytes(engine)
            assert sum(tiers.values()) <= sum(before.values())
        assert engine.report().tier_bytes.get("device", 0) <= before.get("device", 0)
        with engine.offloaded():
            assert all(piece.param.isfinite().all() for unit in engine.units for piece in unit.weights.pieces)
            with torch.no_grad():
                assert torch.equal(engine(batch), loss)
            assert digest(engine) == expected[step]
        assert digest(engine) == expected[step]
    engine.destroy()


def gathered_bytes(engine):
    """The weights that forwards compute with and no release would free."""
    return sum(unit.weights.full_bytes for unit in engine.units if unit.weights.state is WeightsState.GATHERED)


@ranks(2)
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_it_is_entered_between_steps_alone_and_does_not_train(rank, world_size, preset, tmp_path):
    engine = start("gpt", {"preset": preset, "batch": {"accumulation": 2}})
    train_step(engine, rank, 0)
    with engine.offloaded():
        with pytest.raises(RuntimeError, match="has moved the states to the host: leave its `with` block first"):
            engine.load(tmp_path)
        with pytest.raises(RuntimeError, match="cannot move what other code reads"), engine.offloaded():
            pass
        engine.backward(engine(make_batch(engine.module, rank, 1)))
        with pytest.raises(RuntimeError, match="has moved the states to the host"):
            engine.step()
        engine.zero_grad()
    engine.backward(engine(make_batch(engine.module, rank, 1)))
    engine.step()
    with pytest.raises(RuntimeError, match="in the middle of a step"), engine.offloaded():
        pass
    engine.destroy()


@ranks(2)
def test_where_the_host_is_too_small_everything_stays(rank, world_size):
    engine = start("gpt", {"preset": "zero3", "precision": PRECISIONS["bf16"]})
    train_step(engine, rank, 0)
    tiers, expected = engine.report().tier_bytes, digest(engine)
    with pytest.raises(MemoryError, match="host"), states_on_host(*parts_of(engine), SmallHost(calls=5)):
        pass
    assert (engine.report().tier_bytes, digest(engine)) == (tiers, expected)
    train_step(engine, rank, 1)
    engine.destroy()


def parts_of(engine):
    return engine.units, engine.optimizer, engine._ledger


class SmallHost(HostMemory):
    """Memory that is spent after a number of calls."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def zeros(self, numel, dtype):
        self.calls -= 1
        if not self.calls:
            raise MemoryError("no more of the host's memory")
        return super().zeros(numel, dtype)


@ranks(2)
def test_an_engine_may_be_destroyed_inside(rank, world_size):
    engine = start("odd", {"preset": "zero3"})
    train_step(engine, rank, 0)
    with engine.offloaded():
        engine.destroy()
