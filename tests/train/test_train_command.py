"""The command `shardwise train`: its output, how it stops and continues, and how it fails."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from shardwise.train.folder import RunFolder, read
from support import run_command

CLI = [sys.executable, "-m", "shardwise", "train"]
TEXT = "def f(x):\n    return x + 1\n\n\nclass A:\n    pass\n" * 200
SMALL = [
    "--size",
    "nano",
    "--context",
    "16",
    "--sample",
    "4",
    "--log-every",
    "1",
    "--eval-samples",
    "4",
    "--no-plot",
    "--no-foresee",
]
STEP = r"^step +\d+/12  loss \d\.\d{3} .* tokens/s  memory \d+ MB \(peak \d+\)  left 0:\d\d$"
LIMIT_S = 90


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.py").write_text(TEXT)
    return "text.py"


def losses(out):
    return [(row.step, row.loss, row.val_loss, row.grad_norm) for row in read(out / "metrics.jsonl")]


@contextlib.contextmanager
def started(command, cwd):
    """The command in the background, ended with all its children."""
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        process.stderr.close()


def read_until(process, pattern):
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return lines
    pytest.fail(f"no {pattern!r} in {lines}\n{process.stderr.read()}")


@pytest.mark.programs
@pytest.mark.timeout(4 * LIMIT_S)
def test_stopped_by_a_signal_then_continued_by_torchrun_it_is_the_same_run(text, tmp_path, cli, monkeypatch):
    command = [*CLI, text, *SMALL, "--steps", "12", "--out"]
    whole = run_command([*command, "whole"], cwd=tmp_path, timeout=LIMIT_S)
    assert "\x1b" not in whole.stdout
    assert whole.stderr == ""
    assert re.search(r"^model    43.2k parameters: 2 layers, hidden 32", whole.stdout)
    assert "zero3 on 2 ranks (CPU), fp32, 16 x 16 tokens a step" in whole.stdout
    assert len(re.findall(STEP, whole.stdout, re.MULTILINE)) == 12
    assert "--- sample\nimport os\n" in whole.stdout
    assert "file     whole/export/" in whole.stdout

    with started([*command, "parts"], tmp_path) as process:
        shown = read_until(process, r"^step +3/12")
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, errors) == (0, "")
    stopped = re.search(r"^stopped  saved step (\d+) of 12 in parts; the same command continues", rest, re.MULTILINE)
    assert stopped, "".join(shown) + rest
    assert 3 <= int(stopped[1]) < 12
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")[: int(stopped[1])]

    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "shardwise",
    ]
    resumed = run_command([*torchrun, *command[3:], "parts"], cwd=tmp_path, timeout=LIMIT_S)
    assert resumed.stdout.count(f"resume   at step {stopped[1]} of 12, sample {16 * int(stopped[1])}\n") == 1
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")

    monkeypatch.chdir(tmp_path)
    finished = "parts is finished: 12 steps are done. --steps 24 continues, --fresh starts over.\n"
    assert cli(*command[3:], "parts") == (0, finished, "")


@pytest.mark.timeout(2 * LIMIT_S)
def test_a_rank_that_is_killed_is_named_once_and_no_process_is_left(text, tmp_path):
    with started([*CLI, text, *SMALL, "--steps", "100000", "--out", "run"], tmp_path) as process:
        read_until(process, r"^step +2/")
        children = ranks_of(process.pid)
        assert len(children) == 2
        os.kill(children[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert errors.startswith("error: rank 1 ended with signal SIGKILL (out of memory?)")
    assert errors.count("\n") == 1
    assert "Traceback" not in errors
    assert not [pid for pid in children if is_alive(pid)]


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGHUP, marks=pytest.mark.programs)])
def test_ranks_save_and_exit_when_their_parent_is_killed_or_the_terminal_closes(text, tmp_path, number):
    with started([*CLI, text, *SMALL, "--steps", "100000", "--out", "run"], tmp_path) as process:
        read_until(process, r"^step +2/")
        children = ranks_of(process.pid)
        assert len(children) == 2
        process.stdout.close()  # as when the terminal closes
        process.send_signal(number)
        process.wait(timeout=LIMIT_S)
        assert not [pid for pid in children if is_alive(pid)]
    assert RunFolder(tmp_path / "run").has_checkpoint


@pytest.mark.programs
@pytest.mark.timeout(2 * LIMIT_S)
def test_an_error_of_one_rank_during_training_is_printed_once(tmp_path):
    tokens = np.zeros(16 * 40 + 1, dtype=np.uint16)
    tokens[16 * 20 + 3] = 999
    tokens.tofile(tmp_path / "t.bin")
    command = [*CLI, "t.bin", "--vocab", "9", *SMALL, "--batch", "2", "--steps", "100", "--out", "run"]
    result = run_command(command, cwd=tmp_path, check=False, timeout=LIMIT_S)
    assert result.stderr == "error: t.bin: token 999 near position 320 is not below --vocab 9\n"
    assert result.returncode == 2


def test_bad_input_is_one_message_and_exit_code_2(cli):
    assert cli("train", "nowhere.txt") == (2, "", "error: there is no file or folder 'nowhere.txt'\n")


def ranks_of(pid):
    """The ranks that `pid` started, in order. Numbers of processes start anew at some point, so they tell no order."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as stat:
            if int(stat.read().rpartition(")")[2].split()[1]) == pid:
                environment = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
                rank = next(value for value in environment if value.startswith(b"RANK="))
                found[int(rank.removeprefix(b"RANK="))] = int(name)
    return [found[rank] for rank in sorted(found)]


def is_alive(pid):
    """Whether a process still runs after 30 s. A zombie does not."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except (ProcessLookupError, FileNotFoundError):
            return False
        time.sleep(0.05)
    return True
