"""Checkpoints whose manifest has a right digest and wrong content: a CheckpointError, or a load of the right values."""

import errno
import hashlib
import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from shardwise.checkpoint import contents
from shardwise.checkpoint.export import export_checkpoint
from shardwise.checkpoint.inspect import describe, summary
from shardwise.errors import CheckpointError, DamagedError, ShardwiseError
from support.forging import changed, places
from support.training import digest, start, train_step

FP16 = {"compute": "fp16", "loss_scale": {"initial": 256.0}}


def make_engine(**more):
    engine = start("odd", {"preset": "zero2", "precision": FP16, **more})
    engine.lr_scheduler = torch.optim.lr_scheduler.MultiStepLR(engine.optimizer, [1, 3], gamma=0.5)
    return engine


@pytest.fixture(scope="module")
def engine():
    made = make_engine()
    yield made
    made.destroy()


@pytest.fixture(scope="module")
def saved(engine, tmp_path_factory):
    """A checkpoint after two steps, its manifest, and the weights in it."""
    for step in range(2):
        train_step(engine, 0, step)
    path = engine.save(tmp_path_factory.mktemp("saved"), state={"epoch": 1, "order": torch.arange(5), "pair": (1, 2.5)})
    body = json.loads((path / "manifest.json").read_text())["manifest"]
    return path, body, weights_of(engine)


def weights_of(engine):
    return {name: value.clone() for name, value in engine.state_dict().items()}


def forge(path, body):
    text = json.dumps(body, separators=(",", ":"))
    head = hashlib.sha256(text.encode()).hexdigest()
    (path / "manifest.json").write_text(f'{{"sha256": "{head}", "manifest": {text}}}\n')


VALUES = st.sampled_from(
    [
        *(..., None, True, -1, 0, 1, 7, 2**70, 0.5, -2.5, 1e308, float("nan"), "", "abc", "3", "renamed"),
        *("float16", "float64", "int32", "bool", "Tensor", "optim/exp_avg/first.weight", "../../etc/passwd"),
        *([], [1], ["x", None], [[0, 0, 1, 8]], {}, {"a": 1}, {"step": 3}),
        *(
            {"$tuple": 5},
            {"$dict": [[1]]},
            {"$dict": 3},
            {"$counter": [[[], 1]]},
            {"$float": "abc"},
            {"$tensor": "none"},
        ),
        *({"$tensor": ["x"]}, {"$scalar": []}, {"$scalar": ["float32", "x"]}, {"$scalar": ["int8", 1000]}),
        *({"$scalar": ["nn", 1]}, {"$tensor": "param/first.weight"}, {"$tensor": "param/empty"}),
    ]
)


@settings(max_examples=200)
@given(st.data())
def test_a_forged_manifest_is_one_of_our_errors_or_loads_the_right_values(engine, saved, tmp_path_factory, data):
    path, body, expected = saved
    # Small sections are as likely as the long list of tensors.
    section = data.draw(st.sampled_from(sorted(body)))
    place = data.draw(st.sampled_from([(), *((section, *inner) for inner in places(body[section]))]))
    forged = tmp_path_factory.mktemp("forged") / "step-2"
    shutil.copytree(path, forged)
    forge(forged, changed(body, place, data.draw(VALUES)))
    out = forged.parent / "out"
    for use in (lambda: describe(forged), lambda: summary(forged), lambda: describe(forged.parent)):
        suppressed(use)
    if suppressed(lambda: export_checkpoint(forged, out)):
        with safe_open(out / "model.safetensors", "pt") as exported:
            for name in exported.keys():  # noqa: SIM118  # not a dictionary
                assert same(exported.get_tensor(name), expected[name])
    if suppressed(lambda: engine.load(forged)):
        assert engine.steps >= 0
        for name, value in weights_of(engine).items():
            assert same(value, expected[name]), name
        # A run that overflowed at the smallest loss scale says so in its next step, resumed or not.
        fails = pytest.raises(FloatingPointError, match="smallest loss scale")
        with fails if engine._scaling.is_exhausted else nullcontext():
            train_step(engine, 0, 5)
        engine.load(path)


def test_a_parameter_that_computes_in_more_precision_than_is_stored_is_refused(saved, tmp_path):
    path, body, _ = saved
    shutil.copytree(path, tmp_path / "step-2")
    forge(tmp_path / "step-2", changed(body, ("params", "layers.1.bias", "compute"), "float64"))
    with pytest.raises(CheckpointError, match=r"layers\.1\.bias computes in float64, and float32 is stored"):
        export_checkpoint(tmp_path / "step-2", tmp_path / "out")


def same(value, expected):
    return value.shape == expected.shape and torch.equal(value, expected.to(value.dtype))


def suppressed(use):
    """Whether `use` returned; it may raise a CheckpointError that says what is wrong, and nothing else."""
    try:
        use()
    except CheckpointError as error:
        cause = error.__cause__
        assert cause is None or isinstance(cause, ShardwiseError), f"a {type(cause).__name__} of Python: {cause}"
        return False
    return True


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (
            ("steps",),
            -3,
            r"manifest\.json is not valid: steps: .* equal to 0: load an",
        ),
        (("training", "steps"), -3, r"\(training\) is not valid: steps"),
        (("training", "steps"), 9, "says 2 steps and 9 steps"),
        (("training", "groups", 0, "lr"), "abc", r"lr of parameter group 0 is 'abc', where the optimizer has"),
        (("training", "groups", 1, "lr"), -1e-3, r"lr of parameter group 1 is -0\.001"),
        (("training", "groups", 1, "betas"), {"$tuple": [0.9, "x"]}, "betas of parameter group 1"),
        (("training", "groups"), 3, "groups: Input should be a valid list"),
        (
            ("training", "lr_scheduler", "gamma"),
            "abc",
            "gamma of the learning-rate scheduler is 'abc', where Mu",
        ),
        (("training", "lr_scheduler", "step"), 5, "step of the learning-rate scheduler is 5"),
        (("training", "scaler", "scale"), {"$scalar": ["float32", -1.0]}, r"scaler\.scale: expected a number"),
        (("params", "first.weight", "extras", "step"), "abc", "counts the steps of 'first.weight' as None and those"),
        (("tensors", "param/first.weight", "dtype"), "int32", "does not hold param/first.weight as I32"),
        (("tensors", "optim/exp_avg/first.weight", "shape"), [91], "which is not that of param/first.weight"),
        (("ranks", 0, "torch"), {"$tensor": "param/first.weight"}, "states of the random number generators"),
        (("files", 0, "crc32"), "00", "crc32"),
        (("serial",), "abc", "serial"),
        (("tag",), "../x", "tag"),
    ],
)
def test_what_is_wrong_is_named_and_the_engine_stays_as_it_was(engine, saved, tmp_path, place, value, message):
    path, body, _ = saved
    engine.load(path)
    shutil.copytree(path, tmp_path / "step-2")
    forge(tmp_path / "step-2", changed(body, place, value))
    before = digest(engine), engine.optimizer.param_groups[0]["lr"], torch.get_rng_state().sum()
    with pytest.raises(CheckpointError, match=message):
        engine.load(tmp_path / "step-2")
    assert (digest(engine), engine.optimizer.param_groups[0]["lr"], torch.get_rng_state().sum()) == before


def test_a_forged_checkpoint_is_passed_over_with_fallback(engine, saved, tmp_path):
    path, body, _ = saved
    shutil.copytree(path, tmp_path / "good")
    shutil.copytree(path, tmp_path / "bad")
    forge(tmp_path / "bad", {**body, "serial": 9, "steps": -1})
    with pytest.raises(DamagedError, match="bad"):
        engine.load(tmp_path)
    assert engine.load(tmp_path, fallback=True)["epoch"] == 1


# Files


SMALL = {"preset": "zero1_offload", "offload": {"buffer_bytes": 256}}


def test_a_key_in_several_pieces_is_one_tensor_of_a_file(tmp_path, monkeypatch):
    """And the files of before, with a key several times in a header that other libraries refuse, still load."""
    engine = start("gpt", SMALL)
    train_step(engine, 0, 0)
    assert any(len(unit.weights.pieces) > len(unit.params) for unit in engine.units), "updated in several pieces"
    paths = [engine.save(tmp_path, "new")]
    engine.save(tmp_path, "staged", blocking=False)
    engine.finish_save()
    with monkeypatch.context() as patch:
        patch.setattr(contents, "joined", lambda slices: slices)
        paths.append(engine.save(tmp_path, "before"))
    paths.append(tmp_path / "staged")
    expected = digest(engine)
    for path in (paths[0], paths[2]):
        with safe_open(path / "rank-00000.safetensors", "pt") as opened:
            for name in (name for name, _ in engine.module.named_parameters()):
                assert torch.equal(opened.get_tensor(f"optim/exp_avg/{name}"), engine.full_state(name)["exp_avg"])
    for path in paths:
        train_step(engine, 0, 1)
        engine.load(path)
        assert digest(engine) == expected
    engine.destroy()


def save_and_wait(engine, path, blocking):
    engine.save(path, blocking=blocking)
    engine.finish_save()


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00000.tmp", "manifest.json"])
@pytest.mark.parametrize("blocking", [True, False])
def test_a_full_disk_names_the_file_what_is_needed_and_what_is_free(tmp_path, monkeypatch, name, blocking):
    engine = start("mlp", {"preset": "zero1"})

    def full(function):
        def write(path, *arguments, **more):
            if path.name == name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(path, *arguments, **more)

        return write

    monkeypatch.setattr(Path, "open", full(Path.open))
    monkeypatch.setattr(Path, "write_text", full(Path.write_text))
    with pytest.raises(CheckpointError, match=rf"{name} cannot be written: No space left .* are needed and"):
        save_and_wait(engine, tmp_path, blocking)
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())
    engine.destroy()
