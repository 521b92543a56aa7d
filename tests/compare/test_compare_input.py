"""Bad input gives one clear message and exit code 2, before any process starts."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch

from shardwise import plotting
from shardwise.compare.job import CompareRow, interpreter
from shardwise.errors import ConfigError
from shardwise.models import loading
from support import run_command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt-27m"], "model 'gpt-27m' is not known: choose one of mlp-100k,"),
        (["--model", "nowhere.py:build"], "there is no file"),
        (["--presets", "zero4"], "unknown preset 'zero4' (did you mean 'zero"),
        (["--peers", "dpp"], "unknown peer 'dpp' (did you mean 'ddp'?)"),
        (["--presets", ""], "nothing to compare"),
        (["--nproc", "0"], "nproc is 0"),
        (["--nproc", "5000"], "nproc is 5000"),
        (["--precision", "fp8"], "unknown precision 'fp8'"),
        (["--device", "tpu"], "unknown device 'tpu'"),
        (["--steps", "0"], "at least 1"),
        (["--json", "no/such/folder/x.json"], "there is no folder"),
        (["--plot", "picture.doc"], "must end in one of"),
    ],
)
def test_one_message_and_code_2(arguments, message, cli):
    code, _, error = cli("compare", *arguments)
    assert code == 2
    assert message in error
    assert error.startswith("error: ")
    assert "Traceback" not in error


def test_a_peer_that_is_not_installed_says_how_to_get_it(monkeypatch):
    monkeypatch.setenv("SHARDWISE_BENCH_PYTHON", "/nowhere/python")
    with pytest.raises(ConfigError, match="make bench-env"):
        interpreter(CompareRow("zero1", "deepspeed"))


def test_without_matplotlib_plots_are_refused_at_once(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'shardwise\[plot\]'"):
        plotting.check_path(tmp_path / "x.png")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def build(:", "cannot be imported: SyntaxError"),
        ("import nowhere", "cannot be imported: ModuleNotFoundError"),
        ("build = 3", "has no function 'build'"),
        ("def build():\n    return 3", "returned int: return (model, make_batch)"),
        ("def build():\n    return 3, 4", "returned (int, int): return (model, make_batch)"),
    ],
)
def test_a_file_that_does_not_give_a_model(text, message, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(loading.WorkloadError, match=re.escape(message)):
        loading.load(f"{path}:build", "cpu")


def test_what_a_model_returns_and_is_given():
    with pytest.raises(loading.WorkloadError, match=r"make_batch\(0, 1\) returned list"):
        loading.arguments(lambda rank, step: [], 0, 1)
    with pytest.raises(loading.WorkloadError, match=r"a tensor of shape \(2,\)"):
        loading.loss_of(torch.ones(2))
    with pytest.raises(loading.WorkloadError, match="returned int"):
        loading.loss_of(3)
    assert loading.loss_of(SimpleNamespace(loss=torch.tensor(2.0))).item() == 2.0


def test_list_names_every_model(cli):
    code, shown, _ = cli("compare", "--list")
    assert code == 0
    for name in ("mlp-100k", "mlp-33m", "mlp-0.5b", "gpt-1m", "gpt-26m", "gpt-2.7b", "small-2000"):
        assert name in shown


def test_help_is_quick_and_does_not_import_torch():
    code = (
        "import sys; sys.argv[1:] = ['--help']\ntry:\n    from shardwise.cli import main; main()\nexcept SystemExit:\n"
    )
    shown = run_command([sys.executable, "-c", code + "    print('torch' in sys.modules)"]).stdout
    assert shown.endswith("False\n")
    assert "compare" in shown


def test_in_a_pipe_progress_is_lines(cli, monkeypatch):
    def compare(settings, rows, progress):
        progress("zero0: memory and bytes sent", 0, 2)
        progress("zero0: round 1 of 1", 1, 2)
        raise ConfigError("enough")

    monkeypatch.setattr("shardwise.compare.command.compare", compare)
    _, out, error = cli("compare")
    assert out == ""
    lines = [line.split(maxsplit=2)[2] for line in error.splitlines()[:2]]
    assert lines == ["1/2  zero0: memory and bytes sent", "2/2  zero0: round 1 of 1"]
