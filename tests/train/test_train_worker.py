"""How a rank reports its failure: to its parent or, under torchrun, by the first rank that fails."""

import pytest
from torch._C._distributed_c10d import HashStore

from shardwise.errors import ConfigError
from shardwise.machine.local_ranks import FOLDER, FailureReport
from shardwise.train import worker
from shardwise.train.options import options_of


def fail(store, options, rank, error):
    try:
        raise error
    except Exception:
        worker.report_failure(store, options, rank, f"rank {rank}: {error}", listen_s=0.0)


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)
    return options_of(outputs={"out": tmp_path})


def test_under_torchrun_one_rank_prints_and_tracebacks_go_to_files(options, tmp_path, capsys):
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


def test_the_parent_gets_reports_and_lost_connections_come_last(options, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    fail(None, options, 0, RuntimeError("Connection closed by peer [127.0.0.1]:1234"))
    fail(None, options, 1, KeyError("x"))
    lost, genuine = (FailureReport.read(tmp_path, rank) for rank in (0, 1))
    assert genuine.order < lost.order
    assert genuine.message.startswith("rank 1: 'x'")
    assert capsys.readouterr().err == ""


def test_debug_shows_the_traceback(options, capsys):
    fail(None, options.model_copy(update={"debug": True}), 0, ZeroDivisionError("oh"))
    assert "Traceback (most recent call last)" in capsys.readouterr().err
