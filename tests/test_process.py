"""The process of a rank as others see it, and ranks that end with their launcher."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import shardwise
from shardwise.machine.local_ranks import FOLDER, LocalRanks, recorded_exit
from shardwise.machine.process import Condition, Identity, _stat
from support import ranks

WORKER = """
import sys, time
sys.path[:0] = {path!r}
from shardwise.machine import process
process.PARENT_POLL_S = 0.05
process.end_with_launcher()
print("ready", flush=True)
time.sleep(60)
"""


def identity(pid):
    mine = Identity.of_this_process()
    return Identity(mine.view, mine.host, pid, int(_stat(pid)[19]), "")


def await_condition(seen, condition):
    deadline = time.monotonic() + 20
    while seen.look()[0] is not condition and time.monotonic() < deadline:
        time.sleep(0.02)
    return seen.look()


def test_what_is_seen_of_another_process():
    child = subprocess.Popen(["sleep", "60"])
    seen = identity(child.pid)
    # A program that is being read from the disk is blocked for a moment.
    assert await_condition(seen, Condition.LIVES)[0] is Condition.LIVES
    child.send_signal(signal.SIGSTOP)
    assert "is stopped (SIGSTOP" in await_condition(seen, Condition.STOPPED)[1]
    child.send_signal(signal.SIGKILL)  # and nobody waits for it: it is a zombie
    assert "was ended by signal SIGKILL (out of memory?)" in await_condition(seen, Condition.ENDED)[1]
    child.wait()
    assert seen.look()[1].endswith("has died")
    other = Identity("another kernel", "far", child.pid, seen.started, "")
    assert other.look()[0] is Condition.UNKNOWN


def test_the_log_is_the_file_behind_stderr(tmp_path):
    program = "import sys; sys.path[:0] = {path!r}\nfrom shardwise.machine.process import Identity\n"
    program += "print(Identity.of_this_process().log)"
    with (tmp_path / "errors").open("w") as errors:
        run = subprocess.run(
            [sys.executable, "-c", program.format(path=sys.path)], stdout=subprocess.PIPE, stderr=errors, text=True
        )
    assert run.stdout.strip() == str(tmp_path / "errors")


def test_local_ranks_tell_the_others_how_one_ended(monkeypatch):
    with LocalRanks("test") as local:
        monkeypatch.setenv(FOLDER, str(local.folder))
        local.start(["sh", "-c", f"while ! test -e {local.folder}/rank1.exit; do sleep 0.02; done"], os.environ)
        local.start(["sh", "-c", "kill -SEGV $$"], os.environ)
        local.wait()
        assert local.exit_codes == [0, -signal.SIGSEGV]
        assert recorded_exit(1) == -signal.SIGSEGV
        assert recorded_exit(2) is None


@pytest.mark.parametrize("is_under_torchrun", [True, False])
def test_a_rank_ends_with_the_torchrun_that_started_it(tmp_path, is_under_torchrun):
    (tmp_path / "worker.py").write_text(WORKER.format(path=sys.path))
    names = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0"} if is_under_torchrun else {}
    script = f"{sys.executable} {tmp_path / 'worker.py'} 2> {tmp_path / 'errors'} & echo $!; wait"
    launcher = subprocess.Popen(["sh", "-c", script], env={**os.environ, **names}, stdout=subprocess.PIPE, text=True)
    pid = int(launcher.stdout.readline())
    worker = identity(pid)
    assert launcher.stdout.readline() == "ready\n"
    launcher.kill()
    launcher.wait()
    if is_under_torchrun:
        assert await_condition(worker, Condition.ENDED)[0] is Condition.ENDED
        assert "has died" in (tmp_path / "errors").read_text()
    else:
        time.sleep(0.3)
        assert worker.look()[0] is Condition.LIVES
        os.kill(pid, signal.SIGKILL)
    launcher.stdout.close()


def gloo_threads():
    return sum("gloo" in (task / "comm").read_text() for task in Path("/proc/self/task").iterdir())


@ranks(2)
def test_a_destroyed_engine_leaves_no_threads(rank, world_size):
    model = torch.nn.Linear(8, 8)
    before = gloo_threads()
    engine = shardwise.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero3")
    engine.backward(engine(torch.ones(2, 8)).sum())
    engine.step()
    assert gloo_threads() > before
    engine.destroy()
    assert gloo_threads() == before


def test_an_engine_of_one_rank_has_no_threads_to_send_with():
    model = torch.nn.Linear(8, 8)
    # The first engine makes the default process group, which has threads.
    shardwise.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero3").destroy()
    before = gloo_threads()
    model = torch.nn.Linear(8, 8)
    engine = shardwise.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero3")
    engine.backward(engine(torch.ones(2, 8)).sum())
    engine.step()
    assert gloo_threads() == before
    engine.destroy()
