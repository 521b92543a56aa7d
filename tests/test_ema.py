"""The moving average: torch's own on one process, whatever the placement; and its swap into the model."""

import copy

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardwise
from support import matrix, ranks
from support.training import digest, make_batch, make_model, make_optimizer, start, train_step

STAGES = ["zero0", "zero1", "zero2", "zero3"]


def averaged_by_torch(name, masters, decay):
    """torch's average of models whose weights were `masters` after each step."""
    model = make_model(name)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    for values in masters:
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(values[name])
        average.update_parameters(model)
    return dict(average.module.named_parameters())


@ranks()
@matrix(
    {
        "world_size": [1, 2, 3],
        "preset": STAGES,
        "count": [1, 2],
        "precision": ["fp32", "bf16"],
        "model": ["gpt", "odd"],
    },
)
def test_the_average_is_torchs_to_the_bit(rank, world_size, preset, count, precision, model):
    config = {"preset": preset, "batch": {"accumulation": count}, "precision": {"compute": precision}}
    engine = start(model, config)
    average, masters = shardwise.ema(engine, decay=0.9), []
    names = [name for name, _ in engine.module.named_parameters()]
    for step in range(4):
        train_step(engine, rank, step)
        masters.append({name: engine.full_param(name) for name in names})
    assert average.updates == 4
    expected = averaged_by_torch(model, masters, 0.9)
    for name in names:
        assert torch.equal(average.full_param(name), expected[name].detach()), name
    with average.applied():
        for name in names:
            assert torch.equal(engine.full_param(name), expected[name].detach()), name
    for name in names:
        assert torch.equal(engine.full_param(name), masters[-1][name]), name
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_the_model_computes_with_the_average_and_trains_on_without_a_trace(rank, world_size, preset):
    engine, other = start("tied", {"preset": preset}), start("tied", {"preset": preset})
    average, _ = shardwise.ema(engine, decay=0.5), shardwise.ema(other, decay=0.5)
    batch = make_batch(engine.module, 0, 7)
    for step in range(3):
        train_step(engine, rank, step)
        train_step(other, rank, step)
        plain = make_model("tied")
        with torch.no_grad():
            for name, param in plain.named_parameters():
                param.copy_(average.full_param(name))
        with average.applied(), torch.no_grad():
            assert torch.equal(engine(batch), plain(batch))
        assert digest(engine) == digest(other)
    engine.destroy()
    other.destroy()


@ranks(2)
def test_an_exception_within_puts_the_weights_back_and_steps_are_refused(rank, world_size):
    engine = start("gpt", {"preset": "zero2"})
    average = shardwise.ema(engine, decay=0.5)
    train_step(engine, rank, 0)
    train_step(engine, rank, 1)
    before = digest(engine)
    message = r"engine.step\(\) cannot update: the averaged weights are applied"
    with pytest.raises(RuntimeError, match=message), average.applied():
        train_step(engine, rank, 2)
    engine.zero_grad()
    assert digest(engine) == before
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("preset", ["zero0", "zero3"])
def test_the_ledger_has_its_bytes(rank, world_size, preset):
    engine = start("gpt", {"preset": preset})
    before = engine.report().memory_bytes.get("optim", 0)
    shardwise.ema(engine)
    held = engine.report().memory_bytes["optim"] - before
    numel = sum(unit.layout.numel for unit in engine.units)
    assert held == 4 * numel // (world_size if preset == "zero3" else 1)
    engine.destroy()


@ranks(2)
def test_its_state_goes_on_under_another_placement(rank, world_size):
    engine = start("odd", {"preset": "zero3"})
    average = shardwise.ema(engine, decay=0.9)
    train_step(engine, rank, 0)
    train_step(engine, rank, 1)
    state = copy.deepcopy(average.state_dict())
    other = start("odd", {"preset": "zero1"})
    restored = shardwise.ema(other)
    restored.load_state_dict(state)
    assert (restored.decay, restored.updates) == (0.9, 2)
    for name, param in engine.module.named_parameters():
        assert torch.equal(restored.full_param(name), average.full_param(name))
        assert param.requires_grad == (name in state["averages"])
    del state["averages"]["scale"]
    with pytest.raises(ValueError, match="'scale' is in one and not in the other"):
        restored.load_state_dict(state)
    engine.destroy()
    other.destroy()


@ranks(2)
@pytest.mark.parametrize("preset", ["zero0", "zero3"])
def test_checkpoints_hold_it(rank, world_size, preset, tmp_path):
    engine = start("gpt", {"preset": "zero3"})
    average = shardwise.ema(engine, decay=0.9)
    for step in range(2):
        train_step(engine, rank, step)
    engine.save(tmp_path)
    other = start("gpt", {"preset": preset})
    restored = shardwise.ema(other, decay=0.9)
    train_step(other, rank, 5)
    other.load(tmp_path)
    assert restored.updates == 2
    for step in (2, 3):
        train_step(engine, rank, step)
        train_step(other, rank, step)
    for name, _ in engine.module.named_parameters():
        assert torch.equal(restored.full_param(name), average.full_param(name)), name
    engine.destroy()
    other.destroy()


def test_no_checkpoint_is_made_or_read_while_it_is_applied(tmp_path):
    """It would have the average for the weights that train, and those for the average."""
    engine = start("mlp", {"preset": "zero2"})
    average = shardwise.ema(engine, decay=0.9)
    for step in range(2):
        train_step(engine, 0, step)
    expected = engine.state_dict()
    for call in (engine.save, engine.load):
        with pytest.raises(RuntimeError, match="the averaged weights are applied"), average.applied():
            call(tmp_path)
    assert not list(tmp_path.iterdir())
    engine.save(tmp_path)
    engine.destroy()
    without = start("mlp", {"preset": "zero2"})
    without.load(tmp_path)  # the average in it is passed over
    assert all(torch.equal(value, expected[name]) for name, value in without.state_dict().items())
    without.destroy()


def test_a_checkpoint_without_an_average_begins_it_anew(tmp_path):
    engine = start("mlp", {"preset": "zero2"})
    train_step(engine, 0, 0)
    engine.save(tmp_path)
    average = shardwise.ema(engine, decay=0.9)
    train_step(engine, 0, 1)
    engine.load(tmp_path)
    assert average.updates == 0
    train_step(engine, 0, 1)
    for name, _ in engine.module.named_parameters():
        assert torch.equal(average.full_param(name), engine.full_param(name)), name
    engine.destroy()


def test_a_decay_outside_of_its_range_is_refused():
    model = make_model("mlp")
    engine = shardwise.initialize(model, make_optimizer(model), "zero1")
    with pytest.raises(ValueError, match=r"decay is 1\.5"):
        shardwise.ema(engine, 1.5)
    engine.destroy()
