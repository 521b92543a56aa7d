"""Two hosts with two ranks each: a lost one is named in time, a slow one is waited for (`make test-hosts`)."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.hosts import Host, Network, missing

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]
STEPS = Path(__file__).parent / "train_steps.py"
TIMEOUT_S = 12.0
GRACE_S = 10.0
"""How much later than the timeout every rank has to have ended."""
START_S = 300.0
RANKS = """
for local in 0 1; do
  (export RANK=$((FIRST + local)) LOCAL_RANK=$local; log=$LOGS/rank$RANK.log
   "$@" > $log 2>&1; code=$?; echo "$(date +%s.%N) exit $code" >> $log) &
done
wait
"""


@pytest.fixture(autouse=True)
def able():
    if lack := missing():
        pytest.skip(lack)


class Job:
    """Four ranks on two hosts, training with the store on the first host."""

    def __init__(self, network: Network, folder: Path, preset: str) -> None:
        self.hosts, self._folder = network.hosts, folder
        world = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500", "LOGS": str(folder)}
        world |= {"MASTER_ADDR": self.hosts[0].address, "PYTHONPATH": ":".join(filter(None, sys.path))}
        command = ["bash", "-c", RANKS, "ranks", sys.executable, STEPS, preset, TIMEOUT_S, 10**6]
        self._processes = [
            host.start("ranks", command, world | {"FIRST": str(2 * number)}) for number, host in enumerate(self.hosts)
        ]

    def log(self, rank: int) -> str:
        path = self._folder / f"rank{rank}.log"
        return path.read_text() if path.exists() else ""

    def steps(self, rank: int) -> int:
        return len(re.findall(r"^\S+ step", self.log(rank), re.MULTILINE))

    def signal(self, rank: int, number: signal.Signals) -> None:
        found = re.search(rf"rank {rank} pid (\d+)", self.log(rank))
        assert found is not None
        self.hosts[rank // 2].signal(self._processes[rank // 2], int(found[1]), number)

    def wait_for_steps(self, count: int, limit_s: float) -> None:
        """Until every rank has made `count` more steps."""
        goals = [self.steps(rank) + count for rank in range(4)]
        deadline = time.monotonic() + limit_s
        while any(self.steps(rank) < goal for rank, goal in enumerate(goals)):
            shown = "\n".join(self.log(rank) for rank in range(4))
            assert " exit " not in shown, shown
            assert time.monotonic() < deadline, f"no {count} steps in {limit_s:g} s:\n{shown}"
            time.sleep(0.1)

    def ends(self, ranks: list[int], since: float) -> dict[int, tuple[float, float, str]]:
        """Of each rank: seconds until its error and until its process had ended, and the text of the error."""
        deadline = since + TIMEOUT_S + GRACE_S
        while time.time() < deadline and not all(" exit " in self.log(rank) for rank in ranks):
            time.sleep(0.1)
        found = {}
        for rank in ranks:
            log = self.log(rank)
            stopped = re.search(r"^(\S+) stopped (.*)$", log, re.MULTILINE)
            ended = re.search(r"^(\S+) exit (\d+)$", log, re.MULTILINE)
            assert stopped is not None, f"rank {rank} raised nothing in time:\n{log}"
            assert ended is not None, f"rank {rank} did not end in time:\n{log}"
            assert ended[2] == "1"
            found[rank] = float(stopped[1]) - since, float(ended[1]) - since, json.loads(stopped[2])
        return found


@pytest.fixture
def job(request, tmp_path):
    with Network(2, tmp_path) as network:
        job = Job(network, tmp_path, request.param)
        job.wait_for_steps(5, START_S)
        yield job


def say(capsys, text: str) -> None:
    with capsys.disabled():
        print(f"\n{text}", flush=True)


def show(capsys, what: str, ends: dict[int, tuple[float, float, str]]) -> None:
    for rank, (stopped_s, ended_s, text) in ends.items():
        first = text.partition(", so none")[0]
        say(capsys, f"{what}: rank {rank} raised after {stopped_s:.1f} s, ended after {ended_s:.1f} s: {first}")


STAGES = pytest.mark.parametrize("job", ["zero1", "zero3"], indirect=True)


def lose(host: Host, how: str) -> None:
    host.cut()
    if how == "power":
        host.kill()


@STAGES
@pytest.mark.parametrize("how", ["link", "power"])
def test_a_lost_host_is_named(job, how, capsys):
    """Its link is cut, or it loses power: no connection is closed."""
    began = time.time()
    lose(job.hosts[1], how)
    ends = job.ends([0, 1] if how == "power" else [0, 1, 2, 3], began)
    show(capsys, f"{how} of host1 lost", ends)
    for rank, (_, _, text) in ends.items():
        if rank < 2:
            assert f"ranks 2, 3 did not answer for {TIMEOUT_S:.0f} s" in text
            assert re.search(r"rank 2: its process \(\d+ on host1\) does not answer", text)
            assert re.search(r"rank 3: its process \(\d+ on host1\) does not answer", text)
        else:
            assert f"rank {rank} waits for " in text
            assert f"held by rank 0 at {job.hosts[0].address}:29500, which has died, stands still or cannot" in text
            assert "ranks 0, 1: on host0, where the store is" in text
            assert "ranks 2, 3: on host1, this host" in text


@STAGES
@pytest.mark.parametrize("rank", [0, 3])
def test_a_killed_rank_is_named(job, rank, capsys):
    """Rank 0 has the store."""
    began = time.time()
    job.signal(rank, signal.SIGKILL)
    ends = job.ends([other for other in range(4) if other != rank], began)
    show(capsys, f"rank {rank} killed", ends)
    for _, _, text in ends.values():
        if rank:
            assert "rank 3 died while others wait for " in text
            assert re.search(r"rank 3: its process \(\d+ on host1\)", text)
        else:
            assert f"held by rank 0 at {job.hosts[0].address}:29500" in text
            assert re.search("ranks 0, 1: on host0, (where the store is|this host)", text)


@pytest.mark.parametrize("job", ["zero3"], indirect=True)
@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_stands_still_for_less_than_the_timeout_is_waited_for(job, rank, capsys):
    job.signal(rank, signal.SIGSTOP)
    time.sleep(0.8 * TIMEOUT_S)
    job.signal(rank, signal.SIGCONT)
    job.wait_for_steps(5, TIMEOUT_S)
    say(capsys, f"rank {rank} stopped for {0.8 * TIMEOUT_S:.1f} s of {TIMEOUT_S:g}: all ranks went on")


@pytest.mark.parametrize("job", ["zero3"], indirect=True)
def test_a_link_that_comes_back_in_time_is_waited_for(job, capsys):
    job.hosts[1].cut()
    time.sleep(0.4 * TIMEOUT_S)
    job.hosts[1].mend()
    job.wait_for_steps(5, TIMEOUT_S + GRACE_S)
    say(capsys, f"link cut for {0.4 * TIMEOUT_S:.1f} s of {TIMEOUT_S:g}: all ranks went on")


def test_processes_of_a_host_end_with_it(tmp_path):
    with Network(1, tmp_path) as network:
        process = network.hosts[0].start("sleep", ["sh", "-c", "sleep 1000 & echo $(hostname); wait"], {})
        while not (shown := network.hosts[0].log("sleep").read_text()):
            time.sleep(0.05)
    assert shown == "host0\n"
    assert process.poll() == -signal.SIGKILL
    assert (
        subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.count(
            network.hosts[0]._namespace
        )
        == 0
    )
