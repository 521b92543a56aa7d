"""Contract C6: a checkpoint loads at any other layout with every bit, and a resumed run equals an uninterrupted one."""

import json
import random
import re
import resource
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import shardwise
from shardwise.checkpoint import files, folder, saving, storage
from shardwise.checkpoint.checkpointable import ModelParts
from shardwise.checkpoint.export import export_checkpoint
from shardwise.checkpoint.inspect import describe
from shardwise.checkpoint.manifest import read_manifest
from shardwise.checkpoint.saving import prepare
from shardwise.errors import CheckpointError, DamagedError
from support import matrix, ranks, run_command, run_ranks
from support.training import digest, make_model, make_optimizer, make_sgd, start, train_step

ROOT = Path(__file__).parent.parent
STAGES = ["zero0", "zero1", "zero2", "zero3"]
PRECISIONS = {name: {"compute": name} for name in ("fp32", "bf16")} | {
    "fp16": {"compute": "fp16", "loss_scale": {"initial": 2.0**20, "window": 2, "hysteresis": 1}}
}


def config(preset, precision="fp32", accumulation=1, min_unit_bytes=None):
    settings = {"preset": preset, "precision": PRECISIONS[precision], "batch": {"accumulation": accumulation}}
    return settings | ({"runtime": {"min_unit_bytes": min_unit_bytes}} if min_unit_bytes else {})


WRAPPERS = {
    "compiled": partial(torch.compile, backend="eager"),
    "recomputed": checkpoint_wrapper,
    "plain": lambda block: block,
}


def wrapped(model, wrapper):
    """The same model with a wrapper around each of its layers; none of them has run yet."""
    model.layers = nn.ModuleList(map(WRAPPERS[wrapper], model.layers))
    return model


# The same number of ranks


@ranks(2)
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
@pytest.mark.parametrize("later", WRAPPERS)
@pytest.mark.parametrize("before", WRAPPERS)
def test_a_checkpoint_loads_with_other_wrappers_around_layers(rank, world_size, preset, before, later, tmp_path):
    engine = start("odd", config(preset))
    train_step(engine, rank, 0)
    expected = {name: engine.full_param(name) for name, _ in engine.module.named_parameters()}
    moment = engine.full_state("layers.1.weight")["exp_avg"]
    wrapped(engine.module, later)  # after initialize: checkpoints keep the names of before
    engine.save(tmp_path / "first")
    engine.export(tmp_path / "exported")
    assert load_file(tmp_path / "exported" / "model.safetensors").keys() == {*expected, "shift"}
    engine.destroy()
    model = wrapped(make_model("odd"), before)
    engine = shardwise.initialize(model, make_optimizer(model), preset)
    engine.load(tmp_path / "first")
    engine.save(tmp_path / "second")
    assert torch.equal(engine.full_state([*dict(model.named_parameters())][6])["exp_avg"], moment)
    engine.destroy()
    engine = start("odd", config(preset))
    engine.load(tmp_path / "second")
    assert all(torch.equal(engine.full_param(name), value) for name, value in expected.items())
    engine.destroy()


def test_parameters_added_after_initialize_are_named(tmp_path):
    engine = start("mlp", config("zero1"))
    engine.module.extra = nn.Linear(2, 2).requires_grad_(False)
    for write in (engine.save, engine.export):
        with pytest.raises(CheckpointError, match=r"'extra.weight' was added to the model after shardwise.initialize"):
            write(tmp_path / "x")
    engine.destroy()


@ranks(2)
def test_complex_buffers_are_saved(rank, world_size, tmp_path):
    model = nn.Linear(4, 4)
    model.register_buffer("rotations", torch.polar(torch.ones(3), torch.arange(3.0)))
    engine = shardwise.initialize(model, make_sgd(model), "zero3")
    expected = model.rotations.clone()
    engine.save(tmp_path)
    model.rotations.zero_()
    engine.load(tmp_path)
    assert torch.equal(model.rotations, expected)
    engine.destroy()


@matrix(
    {
        "world_size": [1, 2, 3],
        "preset": STAGES,
        "precision": list(PRECISIONS),
        "accumulation": [1, 2],
        "model": ["odd", "tied"],
        "blocking": [True, False],
    }
)
@ranks()
def test_resuming_is_never_having_stopped(rank, world_size, preset, precision, accumulation, model, blocking, tmp_path):
    """In fp16 the first steps overflow, so the loss scale and the skipped steps are resumed too."""
    settings = config(preset, precision, accumulation)
    engine = scheduled(model, settings)
    for step in range(2):
        train_step(engine, rank, step)
    engine.save(tmp_path, state={"epoch": 3, "seen": torch.arange(4)}, blocking=blocking)
    expected = go_on(engine, rank)
    engine.destroy()

    engine = scheduled(model, settings)
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    state = engine.load(tmp_path)
    assert (state["epoch"], state["seen"].tolist(), engine.steps) == (3, [0, 1, 2, 3], 2)
    assert go_on(engine, rank) == expected
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_frozen_parameters_can_be_left_out(rank, world_size, preset, tmp_path):
    engine = start("odd", {"preset": preset})
    train_step(engine, rank, 0)
    path = engine.save(tmp_path, frozen=False)
    expected = go_on(engine, rank)
    engine.destroy()
    manifest = read_manifest(path)
    assert manifest.left_out == ("frozen.weight", "frozen.bias")
    assert not any("frozen" in key for key in (*manifest.tensors, *manifest.params))
    assert re.search(r"left out +2 frozen tensors", describe(path))
    with pytest.raises(CheckpointError, match="saved without 2 frozen parameters"):
        export_checkpoint(path, tmp_path / "out")
    engine = start("odd", {"preset": preset})
    engine.load(tmp_path)
    assert go_on(engine, rank) == expected
    engine.destroy()
    model = make_model("odd")
    model.frozen.requires_grad_(True)
    engine = shardwise.initialize(model, make_optimizer(model), {"preset": preset})
    with pytest.raises(CheckpointError, match=r"no parameter 'frozen\.weight'"):
        engine.load(tmp_path)
    engine.destroy()


def scheduled(model, settings):
    engine = start(model, settings)
    engine.lr_scheduler = torch.optim.lr_scheduler.MultiStepLR(engine.optimizer, [1, 3], gamma=0.5)
    return engine


def go_on(engine, rank):
    """All results of two more steps."""
    seen = []
    for step in range(2, 4):
        train_step(engine, rank, step)
        rates = [group["lr"] for group in engine.optimizer.param_groups]
        seen.append((digest(engine), engine.grad_norm.item(), engine.loss_scale, engine.skipped_steps, rates))
    return str([*seen, random.random(), np.random.rand(), torch.rand(2)])


# Another layout

SAVED = {
    1: [("zero1", "fp32", None), ("zero3", "bf16", None)],
    2: [("zero0", "bf16", None), ("zero2", "fp32", 10**9)],
    3: [("zero3", "fp32", None), ("zero1", "bf16", 1)],
    4: [("zero2", "bf16", 1), ("zero3", "fp32", 10**9)],
}
LOADED = {
    1: [("zero2", "bf16", None)],
    2: [("zero3", "fp32", 1), ("zero1", "bf16", None)],
    3: [("zero0", "fp32", 10**9), ("zero3", "bf16", None)],
    4: [("zero1", "fp32", None)],
}
PAIRS = [(saved, loaded) for saved in SAVED for _ in SAVED[saved] for loaded in LOADED for _ in LOADED[loaded]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A checkpoint of every layout in SAVED, each with its whole values in a file beside it."""
    root = tmp_path_factory.mktemp("checkpoints")
    for world_size in SAVED:
        run_ranks(save_layouts, world_size, root)
    return root


def save_layouts(rank, world_size, root):
    for number, layout in enumerate(SAVED[world_size]):
        engine = start("odd", config(*layout[:2], min_unit_bytes=layout[2]))
        for step in range(2):
            train_step(engine, rank, step)
        name = f"{world_size}-{number}"
        engine.save(root / name)
        values = whole_values(engine)
        if rank == 0:
            torch.save(values, root / f"{name}.pt")
        engine.destroy()


def whole_values(engine):
    values = {}
    for name, param in engine.module.named_parameters():
        states = engine.full_state(name) if param.requires_grad else {}
        values[name] = {"param": engine.full_param(name), **states}
    return values


@ranks(1, 2, 3, 4)
def test_any_layout_loads_at_any_other_with_every_bit(rank, world_size, checkpoints):
    for layout in LOADED[world_size]:
        engine = start("odd", config(*layout[:2], min_unit_bytes=layout[2]))
        for path in sorted(path for path in checkpoints.iterdir() if path.is_dir()):
            train_step(engine, rank, 7)  # so that the values differ from those in the checkpoint
            engine.load(path)
            compare(engine, torch.load(f"{path}.pt"))
            assert engine.steps == 2
        train_step(engine, rank, 2)
        engine.destroy()


def compare(engine, expected):
    seen, computing = whole_values(engine), engine.state_dict()
    for name, values in expected.items():
        assert seen[name].keys() == values.keys()
        for key, value in values.items():
            # A frozen weight has no separate master: loading casts it to the precision of this engine.
            exact = value.to(seen[name][key].dtype)
            assert torch.equal(seen[name][key], exact), (name, key)
        assert torch.equal(computing[name], seen[name]["param"].to(computing[name].dtype)), name


def test_there_are_thirty_pairs_and_more():
    assert len(PAIRS) >= 30
    assert {saved for saved, _ in PAIRS} == {loaded for _, loaded in PAIRS} == {1, 2, 3, 4}


def muon(model):
    inner = {id(param) for param in model.blocks.parameters() if param.ndim == 2}
    return [
        torch.optim.Muon([param for param in model.parameters() if id(param) in inner], lr=0.02),
        torch.optim.AdamW([param for param in model.parameters() if id(param) not in inner], lr=1e-3),
    ]


def adafactor(model):
    return torch.optim.Adafactor(model.parameters(), lr=0.01)


@ranks(2)
@pytest.mark.parametrize("optimizer", [muon, adafactor])
def test_states_that_are_not_flat_come_back(rank, world_size, optimizer, tmp_path):
    """Saved as whole tensors under zero3; loaded under zero3 and where everything is replicated."""
    engine = start("gpt", config("zero3"), optimizer)
    for step in range(2):
        train_step(engine, rank, step)
    engine.save(tmp_path)
    expected = [digest(engine)]
    train_step(engine, rank, 2)
    expected.append(digest(engine))
    engine.destroy()
    for preset in ("zero3", "zero0"):
        engine = start("gpt", config(preset), optimizer)
        engine.load(tmp_path)
        assert digest(engine) == expected[0]
        train_step(engine, rank, 2)
        assert digest(engine) == expected[1]
        engine.destroy()


@ranks(2)
def test_a_rank_reads_what_it_owns(rank, world_size, tmp_path):
    read, stored = load_counted(rank, tmp_path, "zero3")
    assert stored > 4 * 2**20
    assert read < 0.5 * stored + 4 * files.BLOCK_BYTES
    assert load_counted(rank, tmp_path, "zero0")[0] > 0.9 * stored


def load_counted(rank, path, preset):
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    engine = shardwise.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), preset)
    engine.backward(engine(torch.ones(1, 512)).sum())
    engine.step()
    saved = engine.save(path / preset)
    counted, plain = [], files.BlockReader._block

    def block(reader, number):
        is_cached = number in reader._blocks
        data = plain(reader, number)
        counted.append(0 if is_cached else len(data))
        return data

    files.BlockReader._block = block
    try:
        engine.load(saved)
    finally:
        files.BlockReader._block = plain
    engine.destroy()
    return sum(counted), sum(file.stat().st_size for file in saved.glob("*.safetensors"))


@ranks(2, fresh=True)  # new processes, without free heap memory from other tests
def test_load_and_export_need_little_beside_what_is_there(rank, world_size, tmp_path):
    """At most two units and some MB, measured by the kernel; all weights would take at least three times as much."""
    engine, unit_bytes, layers = wide_layers(12)
    bound_bytes = 2 * unit_bytes + 8 * 2**20
    engine.save(tmp_path / "saved")
    torch.distributed.barrier()
    for work in (lambda: engine.load(tmp_path / "saved"), lambda: engine.export(tmp_path / "exported", "fp32")):
        assert peak_beside(work) < bound_bytes < layers * unit_bytes / 3
    assert peak_beside(lambda: torch.ones(layers * unit_bytes // 4).sum()) > bound_bytes
    engine.destroy()


def wide_layers(count):
    """An engine, the bytes of its largest unit and the number of units."""
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(count)))
    engine = shardwise.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero3")
    engine.backward(engine(torch.ones(1, 1024)).sum())
    engine.step()
    engine.full_param("0.bias")
    return engine, 4 * max(unit.layout.numel for unit in engine.units), len(engine.units)


def peak_beside(work):
    """The peak of resident memory during `work`, above the memory before or after it, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - max(before, resident("VmRSS"))


def resident(field):
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


@ranks(2)
def test_states_are_written_once_and_not_sent(rank, world_size, tmp_path):
    sizes = []
    for preset in STAGES:
        engine = start("gpt", config(preset))
        train_step(engine, rank, 0)
        before = engine.comm.sent_bytes["gather"] + engine.comm.sent_bytes["reduce"]
        path = engine.save(tmp_path / preset)
        assert engine.comm.sent_bytes["gather"] + engine.comm.sent_bytes["reduce"] == before
        sizes.append(sum(file.stat().st_size for file in path.glob("*.safetensors")))
        numel = sum(param.numel() for param in engine.module.parameters())
        assert 12 * numel < sizes[-1] < 12 * numel + 100_000
        engine.destroy()
    assert max(sizes) - min(sizes) < 4096


# What else is saved


class Running(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x):
        return self.norm(self.layer(x)).square().mean()


@ranks(2)
def test_running_statistics_of_each_rank_come_back(rank, world_size, tmp_path):
    def begin():
        model = Running()
        return shardwise.initialize(model, make_sgd(model), "zero1")

    engine = begin()
    engine.backward(engine(torch.randn(8, 4) + rank))
    engine.step()
    expected = engine.module.norm.running_mean.clone()
    path = engine.save(tmp_path)
    engine.destroy()
    engine = begin()
    engine.load(tmp_path)
    assert torch.equal(engine.module.norm.running_mean, expected)
    assert engine.module.norm.num_batches_tracked == 1
    keys = folder.read_manifest(path).tensors
    assert "rank-1/buffer/norm.running_mean" in keys
    assert "rank-1/buffer/norm.num_batches_tracked" not in keys
    assert not any("table" in key for key in keys)
    engine.destroy()


def test_files_are_safetensors_that_others_can_read(tmp_path):
    from safetensors.torch import load_file

    engine = start("odd", config("zero3", "bf16"))
    train_step(engine, 0, 0)
    tensors = load_file(engine.save(tmp_path) / "rank-00000.safetensors")
    for name, _ in engine.module.named_parameters():
        if name != "empty":
            assert torch.equal(tensors[f"param/{name}"], engine.full_param(name))
    engine.destroy()


@ranks(2)
def test_a_first_start_finds_nothing(rank, world_size, tmp_path):
    engine = start("mlp", config("zero1"))
    assert engine.load(tmp_path / "nowhere", missing_ok=True) is None
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        engine.load(tmp_path / "nowhere")
    engine.destroy()


def test_a_checkpoint_without_steps_and_one_for_evaluation(tmp_path):
    engine = start("odd", config("zero3"))
    engine.save(tmp_path)
    expected = engine.full_param("first.weight")
    train_step(engine, 0, 0)
    engine.load(tmp_path)
    assert engine.full_state("first.weight") == {}
    engine.destroy()
    engine = shardwise.initialize(make_model("odd"), None, "zero3")
    engine.load(tmp_path)
    assert torch.equal(engine.full_param("first.weight"), expected)
    engine.save(tmp_path, "again")
    engine.destroy()


def test_the_middle_of_an_accumulation_is_refused(tmp_path):
    engine = start("mlp", config("zero2", accumulation=2))
    engine.backward(engine(torch.randn(6, 40)))
    engine.step()
    with pytest.raises(CheckpointError, match="in the middle of an accumulation"):
        engine.save(tmp_path)
    assert not list(tmp_path.iterdir())
    engine.destroy()


def test_retention_keeps_the_newest(tmp_path):
    engine = start("mlp", config("zero1"))
    for step in range(4):
        train_step(engine, 0, step)
        engine.save(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3", "step-4"]
    with pytest.raises(CheckpointError, match="keep is 0"):
        engine.save(tmp_path, keep=0)
    engine.destroy()


# What does not fit


def other_shape(model):
    model.last = nn.Linear(13, 6)


def other_name(model):
    model.final = model._modules.pop("last")


def other_buffer(model):
    model.register_buffer("more", torch.ones(3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_shape, r"of another model: param/last.weight has shape \[5, 13\] there, \[6, 13\] here"),
        (other_name, r"of another model: it has no parameter 'final.weight'"),
        (other_buffer, "of another model: it has no buffer 'more'"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path, change, message):
    engine = start("odd", config("zero1"))
    engine.save(tmp_path)
    engine.destroy()
    model = make_model("odd")
    change(model)
    engine = shardwise.initialize(model, make_optimizer(model), "zero1")
    before = digest(engine)
    with pytest.raises(CheckpointError, match=message):
        engine.load(tmp_path, fallback=True)
    assert digest(engine) == before
    engine.destroy()


def test_another_optimizer_is_refused(tmp_path):
    engine = start("mlp", config("zero1"))
    engine.save(tmp_path)
    engine.destroy()
    engine = start("mlp", config("zero1"), make_sgd)
    with pytest.raises(CheckpointError, match="saved with the optimizer AdamW; this engine has SGD"):
        engine.load(tmp_path)
    engine.destroy()


# Damage


@ranks(2)
def test_damage_is_told_and_passed_over(rank, world_size, tmp_path):
    """Damage every file of the newer of two checkpoints in every way."""
    engine = start("mlp", config("zero3"))
    expected = []
    for step in range(2):
        train_step(engine, rank, step)
        path = engine.save(tmp_path)
        expected.append(digest(engine))
    for name in sorted(file.name for file in path.iterdir()):
        for how in ("flip", "cut", "remove"):
            damage(path / name, how, rank)
            with pytest.raises(DamagedError, match=f"{path.name}/{name}"):
                engine.load(tmp_path, tag="step-2")
            engine.load(tmp_path, tag="step-2", fallback=True)
            assert (digest(engine), engine.steps) == (expected[0], 1)
            mend(path / name, rank)
    engine.load(tmp_path)
    assert (digest(engine), engine.steps) == (expected[1], 2)
    engine.destroy()


def damage(path, how, rank):
    torch.distributed.barrier()
    if rank == 0:
        good = path.read_bytes()
        path.with_name(f".good-{path.name}").write_bytes(good)
        if how == "remove":
            path.unlink()
        elif how == "cut":
            path.write_bytes(good[: len(good) * 2 // 3])
        else:
            # In the values: the header before them is not read by `load`.
            flipped = bytearray(good)
            flipped[len(good) // 2] ^= 4
            path.write_bytes(flipped)
    torch.distributed.barrier()


def mend(path, rank):
    torch.distributed.barrier()
    if rank == 0:
        path.with_name(f".good-{path.name}").rename(path)
    torch.distributed.barrier()


def test_a_flipped_bit_anywhere_in_a_file_is_found(tmp_path):
    engine = start("mlp", config("zero3"))
    train_step(engine, 0, 0)
    path = engine.save(tmp_path)
    engine.destroy()
    chance = random.Random(7)
    for file in path.iterdir():
        good = file.read_bytes()
        for _ in range(40):
            bad = bytearray(good)
            bad[chance.randrange(len(good))] ^= 1 << chance.randrange(8)
            file.write_bytes(bad)
            with pytest.raises(DamagedError, match=file.name):
                folder.verify(path)
        file.write_bytes(good)
    folder.verify(path)


@ranks(2)
@pytest.mark.parametrize("blocking", [True, False])
def test_a_full_disk_on_one_rank_fails_on_all_and_loses_nothing(rank, world_size, tmp_path, blocking):
    engine = start("mlp", config("zero2"))
    train_step(engine, rank, 0)
    engine.save(tmp_path)
    expected = digest(engine)
    train_step(engine, rank, 1)
    with full_disk(rank == 1), pytest.raises(CheckpointError, match=r"rank 1: .*rank-00001.safetensors cannot be w"):
        save_and_wait(engine, tmp_path, blocking)
    torch.distributed.barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    engine.save(tmp_path, "later")
    engine.load(tmp_path, "step-1")
    assert digest(engine) == expected
    engine.destroy()


def save_and_wait(engine, path, blocking):
    engine.save(path, blocking=blocking)
    engine.finish_save()


class full_disk:
    """Within it, this process cannot write more than a few kB to a file."""

    def __init__(self, is_full):
        self.is_full = is_full

    def __enter__(self):
        if self.is_full:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, self.before[1]))

    def __exit__(self, *details):
        if self.is_full:
            resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


@ranks(2)
def test_state_that_cannot_be_saved_fails_on_all_ranks(rank, world_size, tmp_path):
    engine = start("mlp", config("zero2"))
    with pytest.raises(CheckpointError, match="rank 0: state/loader is a object"):
        engine.save(tmp_path, state={"loader": object()} if rank == 0 else None)
    torch.distributed.barrier()
    assert not list(tmp_path.iterdir())
    engine.destroy()


# Asynchronous


@ranks(2)
def test_an_asynchronous_save_is_of_the_moment_it_was_called(rank, world_size, tmp_path):
    engine = start("gpt", config("zero3"))
    train_step(engine, rank, 0)
    expected = digest(engine)
    gate, plain = threading.Event(), files.write_tensors
    saving.write_tensors = lambda *args: gate.wait() and plain(*args)
    try:
        path = engine.save(tmp_path, blocking=False)
        for step in range(1, 3):
            train_step(engine, rank, step)
        assert not path.exists()
        threading.Timer(0.2, gate.set).start()
        second = engine.save(tmp_path, blocking=False)  # waits for the first
        assert path.exists()
        engine.finish_save()
    finally:
        saving.write_tensors = plain
    assert second.exists()
    engine.load(tmp_path, "step-1")
    assert digest(engine) == expected
    engine.destroy()


def test_an_interrupt_while_a_commit_is_under_way_leaves_it_whole(tmp_path, monkeypatch):
    engine = start("mlp", config("zero1"))
    engine.save(tmp_path, "same")
    within, plain = threading.Event(), storage.sync_folder

    def slow(path):
        within.set()
        time.sleep(0.2)
        plain(path)

    def interrupt(comm, work):
        within.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr(storage, "sync_folder", slow)
    engine.save(tmp_path, "same", blocking=False)
    monkeypatch.setattr(saving, "on_rank_0", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.finish_save()
    (path,) = tmp_path.iterdir()
    assert folder.verify(path).serial == 2
    engine.destroy()


@ranks(2)
def test_a_rank_that_fails_does_not_remove_what_rank_0_commits(rank, world_size, tmp_path):
    engine = start("mlp", config("zero2"))
    write = prepare(ModelParts.of(engine), tmp_path, "a", None, None, staged=False)

    def on_rank_0(comm, work):
        if rank == 1:
            raise RuntimeError("rank 2 is gone")
        time.sleep(0.3)
        work()

    plain, saving.on_rank_0 = saving.on_rank_0, on_rank_0
    try:
        saving.save(write, engine.comm)
    except RuntimeError:
        assert rank == 1
    finally:
        saving.on_rank_0 = plain
    torch.distributed.barrier()
    folder.verify(tmp_path / "a")
    engine.destroy()


def test_an_engine_that_goes_away_waits_while_others_write(tmp_path, monkeypatch):
    """For three times the limit, while files grow."""
    calls, plain = [], saving.CheckpointWrite.is_written

    def is_written(write):
        calls.append(1)
        (write.draft.path / "growing").write_bytes(b"x" * len(calls))
        return len(calls) * write.poll_s > 1.5 and plain(write)

    monkeypatch.setattr(saving, "AsyncSave", partial(saving.AsyncSave, last_wait_s=0.5))
    monkeypatch.setattr(saving.CheckpointWrite, "is_written", is_written)
    engine = start("mlp", config("zero1"))
    path = engine.save(tmp_path, blocking=False)
    engine.destroy()
    folder.verify(path)


ENDING = """
import torch, shardwise
model = torch.nn.Linear(64, 64)
engine = shardwise.initialize(model, torch.optim.AdamW(model.parameters()), "zero2")
engine.save("saved", blocking=False)
"""


def test_a_program_that_ends_completes_its_save(tmp_path):
    (tmp_path / "script.py").write_text(ENDING)
    run_command([sys.executable, "script.py"], cwd=tmp_path, forked=True)
    folder.verify(tmp_path / "saved" / "step-0")


ABANDONED = """
from functools import partial
from shardwise.checkpoint import saving
AsyncSave = saving.AsyncSave
saving.AsyncSave = partial(AsyncSave, last_wait_s=0.2)
saving.CheckpointWrite.is_written = lambda write: False
"""


def test_a_program_that_ends_does_not_wait_for_ranks_that_are_gone(tmp_path):
    (tmp_path / "script.py").write_text(ABANDONED + ENDING)
    ended = run_command([sys.executable, "script.py"], cwd=tmp_path, forked=True)
    assert "not all ranks wrote their part" in ended.stderr
    assert not list((tmp_path / "saved").iterdir())


def test_it_ends_soon_if_a_rank_is_known_to_be_gone(tmp_path):
    failed = """
saving.FAILED_WAIT_S = 0.2
saving.AsyncSave = AsyncSave
from shardwise.comm import ProcessGroupComm
ProcessGroupComm.has_failed = True
"""
    (tmp_path / "script.py").write_text(ABANDONED + failed + ENDING)
    started = time.monotonic()
    ended = run_command([sys.executable, "script.py"], cwd=tmp_path, forked=True)
    assert "not all ranks wrote their part" in ended.stderr
    assert time.monotonic() - started < saving.LAST_WAIT_S / 2


# Kills


@pytest.mark.timeout(200)
def test_kills_at_random_moments_lose_nothing():
    """24 kills; benchmarks/results has a longer log."""
    command = [sys.executable, ROOT / "benchmarks" / "checkpoint_kills.py", "--kills", "24", "--width", "128"]
    started = time.monotonic()
    shown = json.loads(run_command(command, timeout=180, forked=True).stdout)
    assert shown["loaded"] == 24, f"after {time.monotonic() - started:.0f} s"
    assert shown["inside"] >= 12


class Phased:
    """A schedule of a user's own, whose attributes change their kind."""

    def __init__(self):
        self.phase, self.best = False, 0.0

    def step(self):
        self.phase, self.best = "decay", None

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


def test_a_schedule_of_the_users_own_resumes(tmp_path):
    for is_resumed in (False, True):
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = shardwise.initialize(model, optimizer, "zero2", lr_scheduler=Phased())
        if is_resumed:
            engine.load(tmp_path)
            assert (engine.lr_scheduler.phase, engine.lr_scheduler.best) == ("decay", None)
        else:
            engine.backward(engine(torch.ones(2, 4)).mean())
            engine.step()
            engine.save(tmp_path)
        engine.destroy()


class Sums(nn.Module):
    def __init__(self, numel):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numel))

    def forward(self, x):
        return x * self.weight.sum()


@ranks(4)
@pytest.mark.parametrize("preset", ["zero1", "zero3_offload"])
def test_a_rank_with_padding_alone_resumes_momentum(rank, world_size, preset, tmp_path):
    """Of five elements, some ranks own none: fused SGD needs momentum there too, beside that of other units."""

    def begin():
        model = nn.Sequential(Sums(5), Sums(400), Sums(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
        return shardwise.initialize(model, optimizer, {"preset": preset, "runtime": {"units": ["Sums"]}})

    def step(engine):
        engine.backward(engine(torch.ones(1)).sum())
        engine.step()

    engine = begin()
    step(engine)
    engine.save(tmp_path)
    step(engine)
    expected = digest(engine)
    engine.destroy()
    resumed = begin()
    resumed.load(tmp_path)
    step(resumed)
    assert digest(resumed) == expected
    resumed.destroy()
