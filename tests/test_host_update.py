"""Updates made on the host: the same bits where the kernels are the same, and what is sent."""

import copy
import time
from unittest import mock

import pytest
import torch

import shardwise
from shardwise.optim import host_update
from shardwise.optim.host_update import balanced
from support import matrix, ranks
from support.training import digest, make_batch, make_sgd, start, train_step
from test_offload import SMALL, config, train


@matrix(
    {
        "placement": ["zero2_offload", "zero3_offload", "zero3, optim, grads"],
        "precision": ["fp32", "bf16", "fp16"],
        "accumulation": [1, 2],
        "world_size": [1, 2],
        "update": ["host", "split"],
        "looks": [False, True],
        "beside": [False, True],
    },
)
@ranks()
def test_the_same_bits_as_on_the_device(rank, world_size, placement, precision, accumulation, update, looks, beside):
    """On the CPU the host's kernels are the device's. `beside`: in a thread, as it is with a device of its own."""
    common = {"precision": precision, "accumulation": accumulation, "clip": 0.05}
    expected = train("gpt", config(placement, **common), rank, looks)
    with mock.patch.object(host_update, "_works_beside", return_value=beside):
        offload = {"buffer_bytes": SMALL, "update": update}
        assert train("gpt", config(placement, offload=offload, **common), rank, looks) == expected


@ranks(1, 2)
@pytest.mark.parametrize("placement", ["zero2_offload", "zero3_offload"])
def test_what_is_written_reaches_the_next_step(rank, world_size, placement):
    """The weights that wait for the next use are not those of the update where somebody has written since."""

    def run(offload):
        engine = start("gpt", config(placement, "bf16", offload=offload))
        found = []
        for step in range(3):
            train_step(engine, rank, step)
            with shardwise.gathered(engine.module.norm.parameters(), write=True), torch.no_grad():
                engine.module.norm.weight.mul_(2.0)
            with torch.no_grad():
                found.append(engine(make_batch(engine.module, rank, 99)).item())
        found.append(digest(engine))
        engine.destroy()
        return found

    with mock.patch.object(host_update, "_works_beside", return_value=True):
        assert run({"update": "host"}) == run({})


@ranks(1)
def test_options_are_the_users_whatever_the_thread_is_at(rank, world_size):
    """While the thread takes a step, its optimizer has just the groups of that step."""

    def run(groups):
        engine = start("gpt", config("zero2_offload", "bf16", offload={"update": "host"}))
        for step in range(3):
            if step:
                engine._updater._worker.twin.optimizer.param_groups = engine.optimizer.param_groups[:groups]
            train_step(engine, rank, step)
        found = digest(engine)
        engine.destroy()
        return found

    assert run(groups=1) == run(groups=2)


@ranks(1)
@pytest.mark.parametrize("placement", ["zero2_offload", "zero3_offload"])
def test_an_engine_is_destroyed_while_the_host_updates(rank, world_size, placement):
    def work_slowly(update):
        time.sleep(0.05)
        work(update)

    work = host_update.HostedUpdate._work
    with (
        mock.patch.object(host_update, "_works_beside", return_value=True),
        mock.patch.object(host_update.HostedUpdate, "_work", work_slowly),
    ):
        engine = start("gpt", config(placement, "bf16", offload={"update": "host"}))
        for step in range(2):
            train_step(engine, rank, step)
        engine.destroy()


@ranks(2)
def test_an_overflow_leaves_no_trace(rank, world_size):
    with mock.patch.object(host_update, "_works_beside", return_value=True):
        engine = start("gpt", config("zero2_offload", "fp16", offload={"update": "host"}))
        for step in range(3):
            train_step(engine, rank, step)
        before = digest(engine)
        loss = engine(make_batch(engine.module, rank, 5))
        engine.backward(loss * float("inf"))
        engine.step()
        assert digest(engine) == before
        assert engine.skipped_steps == 1
        train_step(engine, rank, 6)
        assert digest(engine) != before
        engine.destroy()


@ranks(1)
def test_saved_states_go_on_where_others_update(rank, world_size, tmp_path):
    """From the device's updates to the host's and back."""
    engine = start("gpt", config("zero2_offload", "bf16", offload={"update": "host"}))
    for step in range(4):
        if step == 2:
            engine.save(tmp_path / "saved")
        train_step(engine, rank, step)
    expected = digest(engine)
    engine.destroy()
    for update in ("device", "split"):
        other = start("gpt", config("zero2_offload", "bf16", offload={"update": update}))
        other.load(tmp_path / "saved")
        for step in (2, 3):
            train_step(other, rank, step)
        assert digest(other) == expected
        other.destroy()


@ranks(1)
def test_what_the_host_updates_sends_its_weights_alone(rank, world_size):
    engine = start("gpt", config("zero2_offload", "bf16", offload={"update": "host"}), make_sgd)
    for step in range(2):
        train_step(engine, rank, step)
    before = dict(engine.report().moved_bytes)
    train_step(engine, rank, 2)
    for unit in engine.units:
        unit.weights.wait_gather()
    moved = {way: size - before[way] for way, size in engine.report().moved_bytes.items()}
    numel = sum(unit.layout.numel for unit in engine.units)
    assert moved == {"host to device": 2 * numel, "device to host": 2 * numel}
    engine.destroy()


@ranks(1)
def test_an_error_on_the_host_is_raised_where_the_weights_are_used(rank, world_size):
    with mock.patch.object(host_update, "_works_beside", return_value=True):
        engine = start("gpt", config("zero2_offload", "bf16", offload={"update": "host"}))
        for step in range(2):
            train_step(engine, rank, step)
        digest(engine)  # nothing is under way
        with mock.patch.object(host_update.HostedUpdate, "_update", side_effect=ArithmeticError("broken on purpose")):
            train_step(engine, rank, 2)
            with pytest.raises(ArithmeticError, match="broken on purpose"):
                engine(make_batch(engine.module, rank, 3))


@ranks(1)
def test_the_share_that_is_asked_for(rank, world_size):
    engine = start("gpt", config("zero2_offload", "bf16", offload={"update": "split", "host_share": 0.25}))
    numels = {unit.name: unit.layout.numel for unit in engine.units}
    taken = sum(numels[unit.name] for unit in engine.units if unit.states.updates_on_host)
    assert 0 < taken < 0.5 * sum(numels.values())
    engine.destroy()


def test_units_are_spread_over_the_order():
    chosen = host_update.hosted([7] * 100, 0.35)
    assert sum(chosen) == 35
    for stop in range(1, 101):
        assert abs(sum(chosen[:stop]) - 0.35 * stop) <= 1
    assert all(host_update.hosted([1, 100, 1], 1.0))
    assert not any(host_update.hosted([1, 100, 1], 0.0))
    assert balanced(1.0, 1.0) == 0.5


def test_states_elsewhere_are_refused():
    model = torch.nn.Linear(4, 4)
    settings = {"preset": "zero1_offload", "offload": {"update": "host"}}
    with pytest.raises(shardwise.ConfigError, match="zero2_offload and zero3_offload"):
        shardwise.initialize(model, torch.optim.AdamW(model.parameters()), settings)


@ranks(1)
def test_an_overflow_just_before_the_host_takes_over(rank, world_size):
    """What the device told its kernels for one step does not stay with the host's."""

    def run(update):
        offload = {"update": update, "device_memory": 1}
        engine = start("gpt", config("zero2_offload", "fp16", offload=offload))
        for step in range(6):
            loss = engine(make_batch(engine.module, rank, step))
            engine.backward(loss * (float("inf") if step == 2 else 1.0))
            engine.step()
        result = digest(engine), engine.skipped_steps, any(unit.states.updates_on_host for unit in engine.units)
        engine.destroy()
        return result

    with mock.patch.object(host_update, "_works_beside", return_value=True):
        expected, seen = run("device"), run("host")
    assert seen[2]
    assert not expected[2]
    assert seen[:2] == expected[:2]


@ranks(1)
def test_loaded_states_reach_the_host(rank, world_size):
    def run(update):
        engine = start("gpt", config("zero2_offload", "bf16", offload={"update": update}))
        for step in range(4):
            if step == 1:
                kept = copy.deepcopy(engine.optimizer.state_dict())
            if step == 3:
                engine.optimizer.load_state_dict(kept)
            train_step(engine, rank, step)
        result = digest(engine)
        engine.destroy()
        return result

    with mock.patch.object(host_update, "_works_beside", return_value=True):
        assert run("host") == run("device")


def two_groups(model):
    """Of one no state is ever made."""
    params = list(model.parameters())
    groups = [{"params": params[::2], "momentum": 0.9}, {"params": params[1::2]}]
    return torch.optim.SGD(groups, lr=0.1)


@ranks(1)
def test_groups_without_state(rank, world_size):
    settings = config("zero2_offload", "bf16")
    expected = train("gpt", settings, rank, False, two_groups)
    with mock.patch.object(host_update, "_works_beside", return_value=True):
        for _ in range(3):
            seen = train("gpt", {**settings, "offload": {"update": "host"}}, rank, False, two_groups)
            assert seen == expected


@ranks(1)
def test_gradients_zeroed_meanwhile_have_been_used(rank, world_size):
    """As plain loops do, right after the step."""

    def run(update, delay_s):
        engine = start("gpt", config("zero2_offload", "bf16", offload={"update": update}))
        for step in range(4):
            train_step(engine, rank, step)
            time.sleep(delay_s)
            engine.optimizer.zero_grad(set_to_none=step % 2 == 0)
        result = digest(engine)
        engine.destroy()
        return result

    expected = run("device", 0)
    with mock.patch.object(host_update, "_works_beside", return_value=True):
        assert [run("host", delay_s) for delay_s in (0, 0.0005, 0.001, 0.002)] == [expected] * 4
