"""Comparisons that run: a few steps of the smallest model, in separate processes."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from shardwise.compare import Comparison, Settings, compare
from shardwise.compare.job import CompareRow, parse_rows
from shardwise.compare.result import data_bytes, verdicts

NUMEL = 99_072


@pytest.fixture(scope="module")
def comparison(forked_ranks):
    """The stages that differ most, two peers, and one row that cannot run."""
    rows = [*parse_rows("zero0,zero3", "ddp,fsdp2"), CompareRow("zero9")]
    reports = []
    with forked_ranks():
        result = compare(
            Settings("mlp-100k", 2, steps=3), rows, lambda text, done, total: reports.append((done, total))
        )
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    return result


def by_name(comparison):
    return {run.name: run for run in comparison.runs}


def test_peaks_come_from_outside_and_split_up(comparison):
    runs = by_name(comparison)
    for run in (runs["zero0"], runs["zero3"], runs["ddp"], runs["fsdp2"]):
        assert len(run.peak_bytes) == 2
        assert sum(run.peak_split_bytes.values()) == run.peak
        assert run.peak_rss_bytes[0] > 100e6
    assert runs["ddp"].predicted is None
    assert runs["zero0"].predicted == pytest.approx(runs["zero0"].peak, rel=0.01)
    assert runs["zero3"].predicted == pytest.approx(runs["zero3"].peak, rel=0.01)
    assert runs["zero0"].resting_bytes["weights"] == 4 * NUMEL
    assert runs["zero0"].resting_bytes["optim"] == pytest.approx(8 * NUMEL, rel=0.01)
    assert runs["zero3"].resting_bytes["weights"] == 2 * NUMEL
    assert runs["zero3"].resting_bytes["grads"] == 2 * NUMEL
    assert runs["ddp"].resting_bytes["grads"] == 4 * NUMEL
    assert runs["zero3"].saved(runs["zero0"]) > 0.2


def test_bytes_on_the_wire_are_those_of_the_formula(comparison):
    runs = by_name(comparison)
    assert runs["zero0"].expected_wire_bytes_per_step == 4 * NUMEL
    assert data_bytes(runs["zero0"]) == 4 * NUMEL
    assert data_bytes(runs["ddp"]) == 4 * NUMEL
    assert runs["zero3"].expected_wire_bytes_per_step == data_bytes(runs["fsdp2"]) == 6 * NUMEL
    assert 5 * NUMEL < data_bytes(runs["zero3"]) <= 6 * NUMEL


def test_all_train_the_same_and_are_timed(comparison):
    runs = [run for run in comparison.runs if run.error is None]
    assert len(runs) == 4
    for run in runs:
        assert run.wrong is None
        assert run.losses == pytest.approx(runs[0].losses, rel=1e-4)
        assert len(run.losses) == 5
        assert run.losses[-1] < run.losses[0]
        assert run.step_s_spread[0] <= run.step_s <= run.step_s_spread[1]
        assert 0 <= run.comm_share < 1
    assert by_name(comparison)["zero0"].weights_sha256 == by_name(comparison)["zero3"].weights_sha256
    assert comparison.parameters == NUMEL


def test_a_failing_row_shows_its_error_and_the_others_go_on(comparison):
    failed = by_name(comparison)["zero9"]
    assert "ConfigError" in failed.error
    assert failed.step_s is None
    assert [each.name for each in verdicts(comparison) if not each.is_good] == ["zero9"]


def test_json_is_stable_and_reads_back(comparison, tmp_path):
    path = tmp_path / "result.json"
    comparison.save(path)
    data = json.loads(path.read_text())
    assert data["schema"] == 1
    assert {"world_size", "precision", "device", "accumulate", "versions", "runs"} <= data.keys()
    promised = {"preset", "peer", "peak_bytes", "predicted_peak_bytes", "resting_bytes", "wire_bytes_per_step"}
    promised |= {"expected_wire_bytes_per_step", "step_s", "step_s_spread", "losses", "weights_sha256", "error"}
    for run in data["runs"]:
        assert promised <= run.keys()
    assert set(data["runs"][0]["resting_bytes"]) == {"weights", "grads", "optim"}
    assert set(data["runs"][0]["wire_bytes_per_step"]) == {"gather", "reduce", "other", "total"}
    assert Comparison.load(path) == comparison


@pytest.mark.programs
def test_the_command_with_a_model_of_the_users(tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Output:\n    def __init__(self, loss):\n        self.loss = loss\n"
        "class Model(torch.nn.Linear):\n"
        "    def forward(self, x, y):\n        return Output((super().forward(x) - y).square().mean())\n"
        "def build():\n"
        "    return Model(8, 4), lambda rank, step: {'x': torch.ones(2, 8) * rank, 'y': torch.ones(2, 4)}\n"
    )
    words = ["--model", "mine.py:build", "--presets", "zero2", "--steps", "1", "--nproc", "1"]
    code, shown, _ = cli("compare", *words, "--json", "out.json", "--plot")
    assert code == 0
    assert "zero2" in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert json.loads((tmp_path / "out.json").read_text())["model"] == "mine.py:build"
    assert (tmp_path / "compare-mine.py-build.png").read_bytes().startswith(b"\x89PNG")


def test_a_model_that_is_wrong_ends_everything_with_one_message(tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def build():\n    raise RuntimeError('no luck')\n")
    code, _, errors = cli("compare", "--model", "mine.py:build", "--nproc", "1")
    progress, error = errors.splitlines()
    assert progress.endswith("zero0: memory and bytes sent")
    assert (code, error) == (2, "error: model 'mine.py:build': build() raised RuntimeError: no luck")


@pytest.mark.full
def test_deepspeed_agrees():
    """Needs DeepSpeed installed."""
    python = Path(__file__).parents[2] / ".bench-env" / "bin" / "python"
    if not python.exists() or subprocess.run([python, "-c", "import deepspeed"], capture_output=True).returncode:
        pytest.skip("make bench-env was not run")
    result = compare(Settings("mlp-100k", 2, steps=1), parse_rows("zero1", "deepspeed-zero1"))
    ours, theirs = result.runs
    assert theirs.error is None
    assert theirs.wrong is None
    assert data_bytes(theirs) == 1.5 * data_bytes(ours)  # an all-reduce, then an all-gather
    assert os.environ.get("DS_ACCELERATOR") is None
