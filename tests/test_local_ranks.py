"""Local ranks: which failure is reported, what signals do, and that no process is left."""

import json
import os
import signal
import time

import pytest

from shardwise.machine.local_ranks import FailureReport, LocalRanks
from shardwise.train.command import report

BROKEN = "echo a warning >&2; echo something broke >&2; "
LOST = (0, "rank 0: RuntimeError: connection closed by peer", True)
GENUINE = (2, "rank 2: KeyError: 'x'", False)


@pytest.fixture
def ended(capsys):
    """Runs one shell script per rank to its end: the exit code of `shardwise train`, and what it prints."""

    def run(scripts, reports=(), stop_requests=0):
        with LocalRanks("test") as ranks:
            for script in scripts:
                ranks.start(["sh", "-c", BROKEN + script], os.environ)
            for rank, message, is_consequence in reports:
                FailureReport.write(ranks.folder, rank, message, is_consequence)
            if stop_requests < 2:
                ranks.wait()
            for _ in range(stop_requests):
                ranks.request_stop()
            ranks.wait()
            return report(ranks), capsys.readouterr().err

    return run


def test_the_failure_that_explains_the_others_is_printed_and_no_other(ended):
    assert ended(["exit 0", "exit 0"]) == (0, "")
    assert ended(["exit 1", "exit 0", "exit 1"], [LOST, GENUINE]) == (1, "error: rank 2: KeyError: 'x'\n")
    code, message = ended(["exit 1", "kill -SEGV $$"], [LOST])
    assert (code, message) == (1, "error: rank 1 ended with signal SIGSEGV: something broke\n")


def test_a_failure_keeps_its_exit_code(ended):
    assert ended(["exit 2"], [(0, "no text", False)]) == (2, "error: no text\n")


def test_a_signal_that_comes_too_early_or_twice(ended):
    assert ended(["kill -TERM $$", "kill -KILL $$"], stop_requests=1) == (0, "")
    code, message = ended(["trap '' TERM; sleep 60", "trap '' TERM; sleep 60"], stop_requests=2)
    assert (code, message) == (130, "ended at once: what was trained since the last checkpoint is lost\n")


def test_a_report_that_cannot_be_read_is_a_death(ended, tmp_path):
    (tmp_path / "rank0.json").write_text(json.dumps("x")[:-1])
    assert FailureReport.read(tmp_path, 0) is None
    (tmp_path / "rank0.json").write_text(json.dumps("x"))
    assert FailureReport.read(tmp_path, 0) is None
    assert ended(["exit 3"]) == (1, "error: rank 0 ended with exit code 3: something broke\n")


def test_the_first_request_to_stop_reaches_every_rank_and_lets_it_finish(tmp_path):
    with LocalRanks("test") as ranks:
        for rank in range(2):
            script = f"trap 'touch saved{rank}; exit 0' TERM; touch ready{rank}; while true; do sleep 0.02; done"
            ranks.start(["sh", "-c", f"cd {tmp_path}; {script}"], os.environ)
        deadline = time.monotonic() + 30
        while len(list(tmp_path.glob("ready*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        with ranks.stopping_on_signals():
            os.kill(os.getpid(), signal.SIGTERM)
        ranks.wait()
        assert ranks.exit_codes == [0, 0]
    assert len(list(tmp_path.glob("saved*"))) == 2


def test_leaving_kills_ranks_with_the_processes_they_started_and_removes_the_folder(tmp_path):
    with LocalRanks("test") as ranks:
        script = f"cd {tmp_path}; sleep 60 & echo $! > new; mv new pid; wait"
        ranks.start(["sh", "-c", script], os.environ)
        deadline = time.monotonic() + 30
        while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
    assert ranks.exit_codes == [-signal.SIGKILL]
    assert not ranks.folder.exists()
    child = int((tmp_path / "pid").read_text())
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(child)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
