"""The tools for checkpoints: export, inspect and the import of DeepSpeed's checkpoints."""

import contextlib
import json
import pickle
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import shardwise
from shardwise import cli
from shardwise.checkpoint.deepspeed import convert, load_inert, spread
from shardwise.checkpoint.export import export_checkpoint
from shardwise.checkpoint.inspect import describe, summary
from shardwise.errors import CheckpointError
from support import ranks
from support.training import make_model, start, train_step

DEEPSPEED = Path(__file__).parent / "deepspeed_checkpoints"
CASES = sorted(path.name for path in DEEPSPEED.iterdir() if path.is_dir())


class WithConfig(nn.Module):
    """A model with a configuration object, as Hugging Face's models have."""

    class config:
        @staticmethod
        def to_json_string():
            return '{"model_type": "small"}\n'

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, x):
        return self.inner(x)


# Export


@ranks(1, 2, 3)
@pytest.mark.parametrize("name", ["tied", "odd"])
def test_export_writes_what_the_model_computes_with(rank, world_size, name, tmp_path):
    for preset, precision in (("zero3", "bf16"), ("zero0", "fp32")):
        model = WithConfig(make_model(name))
        trained = [param for param in model.parameters() if param.requires_grad]
        settings = {"preset": preset, "precision": {"compute": precision}}
        engine = shardwise.initialize(model, torch.optim.AdamW(trained), settings)
        folder = tmp_path / f"{preset}-{world_size}"
        engine.save(folder / "saved")
        engine.export(folder / "live", max_file_bytes=1_500)
        engine.export(folder / "single", dtype="fp32")
        expected = engine.state_dict()
        masters = {each: engine.full_param(each) for each, _ in model.named_parameters()}
        if rank == 0:
            export_checkpoint(folder / "saved", folder / "offline", max_bytes=1_500)
            check_export(folder, expected, masters, model)
        engine.destroy()


def check_export(folder, expected, masters, model):
    live = read_index(folder / "live")
    names = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    assert set(live) == names
    assert set(expected) - names == ({"inner.head.weight"} if hasattr(model.inner, "head") else set())
    for name, value in live.items():
        assert value.dtype == expected[name].dtype
        assert torch.equal(value, expected[name]), name
    for path in sorted((folder / "live").iterdir()):
        assert path.read_bytes() == (folder / "offline" / path.name).read_bytes(), path.name
    single = load_file(folder / "single" / "model.safetensors")
    for name, value in masters.items():
        assert torch.equal(single[name], value.float())
    assert sorted(path.name for path in (folder / "single").iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((folder / "offline" / "config.json").read_text()) == {"model_type": "small"}


def read_index(folder):
    """The tensors of an export, each from the file that the index names."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {file: load_file(folder / file) for file in set(index["weight_map"].values())}
    assert len(files) > 1
    assert sorted(files) == sorted(path.name for path in folder.glob("*.safetensors"))
    assert index["metadata"]["total_size"] == sum(t.nbytes for file in files.values() for t in file.values())
    return {name: files[file][name] for name, file in index["weight_map"].items()}


def test_an_export_never_overwrites_and_leaves_nothing_behind_when_it_fails(tmp_path):
    engine = start("mlp", {"preset": "zero1"})
    engine.save(tmp_path / "saved")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(CheckpointError, match="exists and is not an empty folder"):
        engine.export(tmp_path / "out")
    file = tmp_path / "saved" / "step-0" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors is damaged"):
        export_checkpoint(tmp_path / "saved", tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "saved"]
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        engine.export(tmp_path / "new", dtype="int8")
    engine.destroy()


def command(monkeypatch, capsys, *words):
    """Exit code, output and errors of `shardwise ...`, in this process."""
    monkeypatch.setattr(sys, "argv", ["shardwise", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, *capsys.readouterr()


def test_the_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    engine = start("tied", {"preset": "zero2", "precision": {"compute": "bf16"}})
    train_step(engine, 0, 0)
    engine.save(tmp_path / "saved")
    engine.destroy()
    code, shown, _ = command(monkeypatch, capsys, "export", "saved", "out", "--dtype", "fp16")
    assert (code, shown.split(":")[0]) == (0, "exported saved/step-1 to out")
    assert load_file(tmp_path / "out" / "model.safetensors")["embed.weight"].dtype == torch.float16
    code, _, errors = command(monkeypatch, capsys, "export", "saved", "out")
    assert (code, errors.count("\n")) == (2, 1)
    code, _, errors = command(monkeypatch, capsys, "export", "saved", "new", "--max-file", "many")
    assert (code, errors.startswith("error: --max-file many: ")) == (2, True)
    code, shown, _ = command(monkeypatch, capsys, "inspect", "saved", "--verify")
    assert (code, shown.startswith("step-1: step 1, 1 ranks, ")) == (0, True)
    assert shown.endswith("verified\n")
    assert json.loads(command(monkeypatch, capsys, "inspect", "saved/step-1", "--json")[1])["steps"] == 1


@pytest.fixture
def saved(tmp_path):
    engine = start("tied", {"preset": "zero2"})
    path = engine.save(tmp_path / "saved")
    engine.destroy()
    return path


def test_what_cannot_be_written_is_one_message(tmp_path, saved, monkeypatch, capsys):
    (tmp_path / "file").write_text("")  # not even root can create a folder in a file
    (tmp_path / "out").mkdir()
    deepspeed = ("import-deepspeed", DEEPSPEED / "zero3-fp32")
    for words in (("export", saved), deepspeed):
        shown = command(monkeypatch, capsys, *words, tmp_path / "file" / "x")
        check_message(shown, "cannot be written: ")
        with full_disk():
            shown = command(monkeypatch, capsys, *words, tmp_path / "out" / "x")
        check_message(shown, "cannot be written: File too large")
    assert not [path for path in (tmp_path / "out").rglob("*") if path.name != "x"]


def check_message(shown, message):
    code, output, errors = shown
    assert (code, output, errors.count("\n")) == (2, "", 1)
    assert message in errors


@contextlib.contextmanager
def full_disk():
    """Within it, this process cannot write more than a few bytes to a file."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_what_inspect_tells(tmp_path):
    engine = start("tied", {"preset": "zero2", "precision": {"compute": "bf16"}})
    train_step(engine, 0, 0)
    path = engine.save(tmp_path, state={"epoch": 1})
    engine.destroy()
    text = describe(path, verified=True)
    assert "tied to embed.weight  head.weight" in text
    assert "optimizer AdamW" in text
    assert "bfloat16" in text
    facts = summary(path)
    assert (facts["steps"], facts["world_size"], facts["state"]) == (1, 1, {"epoch": 1})
    assert facts["bytes_by_kind"]["exp_avg"] == facts["bytes_by_kind"]["param"] == 4 * facts["parameters"]
    (path / "rank-00000.safetensors").write_bytes(b"")
    assert "missing or cut short: rank-00000.safetensors" in describe(tmp_path)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*: name the folder that engine\.save"):
        describe(tmp_path / "nowhere")


# DeepSpeed


@given(st.lists(st.integers(0, 7), min_size=1, max_size=5), st.data())
def test_elements_are_found_in_vectors_laid_end_to_end(lengths, data):
    flat = [(index, at) for index, length in enumerate(lengths) for at in range(length)]
    start = data.draw(st.integers(0, len(flat)))
    numel = data.draw(st.integers(0, len(flat) - start))
    got = [(index, at) for index, part in spread(lengths, start, numel) for at in range(part.start, part.stop)]
    assert got == flat[start : start + numel]


def small_model():
    """The model of deepspeed_checkpoints/make.py, with other values."""
    torch.manual_seed(99)
    model = nn.Module()
    model.embed = nn.Embedding(11, 6)
    model.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
    model.frozen = nn.Linear(6, 6).requires_grad_(False)
    model.norm = nn.LayerNorm(6)
    model.head = nn.Linear(6, 11, bias=False)
    model.head.weight = model.embed.weight
    model.register_buffer("shift", torch.zeros(6))
    return model


@ranks(1, 2)
def test_deepspeeds_checkpoints_load_with_every_bit(rank, world_size, tmp_path):
    for case in CASES:
        if rank == 0:
            convert(DEEPSPEED / case, tmp_path / case)
        torch.distributed.barrier()
        model = small_model()
        trained = [param for param in model.parameters() if param.requires_grad]
        groups = [
            {"params": [param for param in trained if param.ndim >= 2]},
            {"params": [param for param in trained if param.ndim < 2]},
        ]
        settings = {"preset": "zero3" if world_size == 2 else "zero1", "precision": {"compute": case.split("-")[1]}}
        engine = shardwise.initialize(model, torch.optim.AdamW(groups, lr=1.0), settings)
        assert engine.load(tmp_path / case) == {"epoch": 2}
        expected = load_file(DEEPSPEED / case / "expected.safetensors")
        seen = {f"param/{name}": engine.full_param(name).float() for name, _ in model.named_parameters()}
        for name in (name for name, param in model.named_parameters() if param.requires_grad):
            state = engine.full_state(name)
            assert state["step"] == 3
            seen |= {f"optim/{key}/{name}": state[key] for key in ("exp_avg", "exp_avg_sq")}
        assert set(seen) == set(expected)
        for key, value in expected.items():
            assert torch.equal(seen[key], value), (case, key)
        assert [group["lr"] for group in engine.optimizer.param_groups] == [1e-3, 3e-3]
        assert engine.steps == 3
        assert model.shift.eq(0.25).all()
        if "fp16" in case:
            assert engine.loss_scale == 256.0
        engine.destroy()


class Evil:
    def __reduce__(self):
        return subprocess.call, (["touch", "was-run"],)


def test_nothing_of_a_deepspeed_checkpoint_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(DEEPSPEED / "zero2-bf16", tmp_path / "copy")
    path = tmp_path / "copy" / "global_step3" / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(path, weights_only=True), "client": Evil()}, path)
    with pytest.raises(CheckpointError, match=r"model_states\.pt holds something that is not plain data"):
        convert(tmp_path / "copy", tmp_path / "out")
    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"model_states\.pt"):
        load_inert(path)
    assert not (tmp_path / "was-run").exists()
    assert not (tmp_path / "out").exists()


def test_what_is_no_deepspeed_checkpoint_is_told(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no \*zero_pp_rank_\*_optim_states\.pt"):
        convert(tmp_path, tmp_path / "out")
    shutil.copytree(DEEPSPEED / "zero3-bf16", tmp_path / "copy")
    shutil.copytree(tmp_path / "copy" / "global_step3", tmp_path / "beside")
    for tag in ("../../elsewhere", "../beside", "..", "", f"{tmp_path}/beside", "./global_step3", "a\\b"):
        (tmp_path / "copy" / "latest").write_text(tag)
        with pytest.raises(CheckpointError, match="is not the name of a folder in"):
            convert(tmp_path / "copy", tmp_path / "out")
    next((tmp_path / "copy" / "global_step3").glob("*rank_0_*optim_states.pt")).unlink()
    with pytest.raises(CheckpointError, match="lacks a file"):
        convert(tmp_path / "copy", tmp_path / "out", "global_step3")


@pytest.mark.parametrize("case", ["zero2-bf16", "zero3-bf16"])
@pytest.mark.parametrize("content", [{}, [1], {"optimizer_state_dict": {"zero_stage": 3}}, {"module": 1}])
def test_an_unexpected_file_of_deepspeed_is_one_message(tmp_path, case, content, monkeypatch, capsys):
    shutil.copytree(DEEPSPEED / case, tmp_path / "copy")
    for path in sorted((tmp_path / "copy" / "global_step3").glob("*.pt")):
        good = path.read_bytes()
        torch.save(content, path)
        check_message(command(monkeypatch, capsys, "import-deepspeed", tmp_path / "copy", tmp_path / "out"), "copy/gl")
        path.write_bytes(good)
    assert not list(tmp_path.glob("out/*"))


NONSENSE = [("global_steps", -1), ("global_steps", "abc"), ("skipped_steps", None), ("param_shapes", [{"x": (-3,)}])]


@pytest.mark.parametrize(("key", "value"), NONSENSE)
def test_nonsense_in_a_file_of_deepspeed_is_one_message(tmp_path, key, value, monkeypatch, capsys):
    shutil.copytree(DEEPSPEED / "zero2-bf16", tmp_path / "copy")
    path = tmp_path / "copy" / "global_step3" / "mp_rank_00_model_states.pt"
    torch.save({**load_inert(path), key: value}, path)
    check_message(command(monkeypatch, capsys, "import-deepspeed", tmp_path / "copy", tmp_path / "out"), "copy/gl")
    (tmp_path / "copy" / "latest").write_bytes(b"\xff\xfe")
    check_message(command(monkeypatch, capsys, "import-deepspeed", tmp_path / "copy", tmp_path / "out"), "optim_states")
    assert not list(tmp_path.glob("out/*"))


def test_the_import_command(tmp_path, monkeypatch, capsys):
    shown = command(monkeypatch, capsys, "import-deepspeed", DEEPSPEED / "zero3-fp32", tmp_path / "ours")
    assert shown == (0, f"wrote {tmp_path}/ours/global_step3\n", "")
