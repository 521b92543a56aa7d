"""How a rank's failure is told: to its crew or, under torchrun, by the first rank that has something to say."""

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from shardwise.errors import ConfigError
from shardwise.train import crew, worker
from shardwise.train.options import options_of
from support import run_command

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def fail(store, options, rank, error):
    try:
        raise error
    except Exception:
        worker._tell(store, options, rank, f"rank {rank}: {error}")


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.delenv(crew.FOLDER, raising=False)
    monkeypatch.setattr(worker, "LISTENING_S", 0.0)
    return options_of(outputs={"out": tmp_path})


def test_under_torchrun_one_rank_speaks_and_tracebacks_go_to_files(options, tmp_path, capsys):
    store = HashStore()
    for rank in (2, 0):
        fail(store, options, rank, ZeroDivisionError("oh"))
    path = tmp_path / "error-rank2.txt"
    assert capsys.readouterr().err == f"error: rank 2: oh (traceback: {path})\n"
    assert "ZeroDivisionError: oh" in path.read_text()
    assert (tmp_path / "error-rank0.txt").exists()


def test_bad_input_has_no_traceback(options, tmp_path, capsys):
    fail(HashStore(), options, 1, ConfigError("no text"))
    assert capsys.readouterr().err == "error: rank 1: no text\n"
    assert not list(tmp_path.iterdir())


def test_a_crew_gets_last_words_and_lost_connections_come_last(options, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(crew.FOLDER, str(tmp_path))
    fail(None, options, 0, RuntimeError("Connection closed by peer [127.0.0.1]:1234"))
    fail(None, options, 1, KeyError("x"))
    words = [crew.LastWords.read(tmp_path, rank) for rank in (0, 1)]
    assert words[1]["order"] < words[0]["order"]
    assert words[1]["message"].startswith("rank 1: 'x'")
    assert capsys.readouterr().err == ""


def test_debug_shows_the_traceback(options, capsys):
    fail(None, options.model_copy(update={"debug": True}), 0, ZeroDivisionError("oh"))
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(
    "arguments", [["--nproc", "1", "--precision", "bf16"], ["--nproc", "2", "--precision", "fp16"]]
)
def test_on_a_gpu(tmp_path, arguments):
    """One rank over NCCL, and two that share the GPU over Gloo; stopped in effect by --steps, then gone on."""
    import sys

    from shardwise.train.metrics import read

    (tmp_path / "text.py").write_text("def f(x):\n    return x + 1\n\n\n" * 200)
    command = [sys.executable, "-m", "shardwise", "train", "text.py", "--size", "nano", "--context", "16"]
    command += ["--device", "cuda", "--sample", "5", "--out", "run", *arguments]
    shown = run_command([*command, "--steps", "10"], cwd=tmp_path, timeout=180).stdout
    assert "(GPU)" in shown
    run_command([*command, "--steps", "14"], cwd=tmp_path, timeout=180)
    rows = read(tmp_path / "run/metrics.jsonl")
    assert [row.step for row in rows] == list(range(1, 15))
    assert rows[-1].loss < rows[0].loss
    assert 0 < rows[-1].memory_bytes <= rows[-1].peak_bytes < 2**30
