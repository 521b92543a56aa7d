"""`shardwise run`: torchrun with a sensible thread count."""

import sys

import pytest

from shardwise.errors import ConfigError
from shardwise.machine import launch
from support import run_command

CLI = [sys.executable, "-c", "from shardwise.cli import main; main()"]
SCRIPT = "import os, sys; print('got', os.environ['RANK'], os.environ['OMP_NUM_THREADS'], sys.argv[1:], flush=True)"


def test_a_script_runs_on_every_rank_with_its_own_options(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [*CLI, "run", "-n", "2", "--threads", "3", "script.py", "--lr", "1e-4", "-n", "7"]
    shown = run_command(command, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"}).stdout
    assert sorted(line for line in shown.splitlines() if line.startswith("got")) == [
        "got 0 3 ['--lr', '1e-4', '-n', '7']",
        "got 1 3 ['--lr', '1e-4', '-n', '7']",
    ]


def test_threads_are_a_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(launch, "cores", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch.run_environment(4)["OMP_NUM_THREADS"] == "4"
    assert launch.run_environment(3)["OMP_NUM_THREADS"] == "5"
    assert launch.run_environment(32)["OMP_NUM_THREADS"] == "1"
    assert launch.run_environment(4, threads=2)["OMP_NUM_THREADS"] == "2"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert launch.run_environment(4)["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize(
    ("ranks", "command", "message"),
    [(0, ["-m", "x"], "-n 0"), (1, [], "nothing to run"), (1, ["nowhere.py"], "there is no script 'nowhere.py'")],
)
def test_bad_input(ranks, command, message):
    with pytest.raises(ConfigError, match=message):
        launch.run_command(ranks, command)


def test_a_failing_script_gives_its_exit_code(tmp_path, cli):
    (tmp_path / "script.py").write_text("raise SystemExit(3)")
    assert run_command([*CLI, "run", "script.py"], cwd=tmp_path, check=False).returncode != 0
    assert cli("run", "nowhere.py") == (2, "", "error: there is no script 'nowhere.py'\n")
