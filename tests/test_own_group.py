"""The process group that `initialize` made ends with the process; one of the user's does not."""

import os
import sys
import threading
from types import SimpleNamespace

import pytest

from shardwise.comm import groups
from support import run_command

SCRIPT = """
import atexit, sys, torch, torch.distributed as dist
from torch._C._distributed_c10d import HashStore
atexit.register(lambda: print("left:", dist.is_initialized(), flush=True))  # runs last
if "own" in sys.argv:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
import shardwise
model = torch.nn.Linear(4, 4)
engine = shardwise.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero2")
engine.backward(engine(torch.ones(2, 4)).mean())
engine.step()
if "fail" in sys.argv:
    raise ValueError("in the loop")
"""


@pytest.mark.parametrize(("word", "left", "code"), [("ours", "False", 0), ("own", "True", 0), ("fail", "True", 1)])
def test_only_a_group_of_ours_is_destroyed_and_only_after_success(word, left, code, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_command([sys.executable, tmp_path / "script.py", word], check=False, forked=True)
    assert done.returncode == code, done.stderr
    assert f"left: {left}" in done.stdout


@pytest.fixture
def ending(monkeypatch):
    """What `_end_world` does, on a group that is not there."""
    calls = []
    group = object()
    fake = SimpleNamespace(
        group=SimpleNamespace(WORLD=group),
        is_initialized=lambda: True,
        destroy_process_group=lambda _: calls.append("destroyed"),
    )
    monkeypatch.setattr(groups, "dist", fake)
    monkeypatch.setattr(os, "_exit", calls.append)
    return group, calls


def test_a_forked_child_and_a_later_group_are_left_alone(ending):
    group, calls = ending
    groups._end_world(group, os.getpid() + 1)
    groups._end_world(object(), os.getpid())
    assert calls == []
    groups._end_world(group, os.getpid())
    assert calls == ["destroyed"]


def test_a_rank_that_hangs_does_not_hold_the_exit(ending, monkeypatch, capsys):
    group, calls = ending
    release = threading.Event()
    monkeypatch.setattr(groups.dist, "destroy_process_group", lambda _: release.wait())
    monkeypatch.setattr(groups, "END_S", 0.05)
    groups._end_world(group, os.getpid())
    release.set()
    assert calls == [1]
    assert "another rank has not left" in capsys.readouterr().err
