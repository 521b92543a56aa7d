"""torchrun on three hosts: one is lost, the others continue from the last checkpoint, and it joins again."""

import re
import sys
import time
from pathlib import Path

import pytest

from support.hosts import Host, Network, missing

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(1500)]
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "elastic.py"
TIMEOUT_S = 12.0
LIMIT_S = 300.0
EVERY = 5


def start(host: Host, name: str, first: Host, folder: Path) -> None:
    """torchrun with one process, as the docs say, but for waits that are shorter than torchrun's own."""
    quickly = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2:3", "--nproc-per-node=1", "--max-restarts=9"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={first.address}:29400", "--rdzv-id=run"]
    command += [f"--rdzv-conf={quickly},is_host={int(host is first)}", f"--local-addr={host.address}"]
    options = ["--dir", folder, "--steps", 10**6, "--every", EVERY, "--timeout", TIMEOUT_S, "--pause", 0.1]
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": ":".join(filter(None, sys.path))}
    host.start(name, [*command, EXAMPLE, *options], variables)


def starts(folder: Path) -> list[tuple[int, int]]:
    """At which step each round began, and with how many processes, from the logs of all hosts."""
    logs = [path.read_text() for path in folder.glob("host*.log")]
    found = [pair for log in logs for pair in re.findall(r"from step (\d+) on (\d) processes", log)]
    return sorted((int(step), int(processes)) for step, processes in found)


def newest(folder: Path) -> int:
    return max([int(path.name[5:]) for path in folder.glob("step-*") if path.name[5:].isdigit()], default=0)


def wait_for(is_so, folder: Path, what: str) -> float:
    """Seconds until it was so."""
    began = time.monotonic()
    while not is_so():
        shown = "\n".join(f"{path.name}\n{path.read_text()}" for path in folder.glob("host*.log"))
        assert time.monotonic() - began < LIMIT_S, f"{what}: not in {LIMIT_S:g} s\n{shown}"
        time.sleep(0.1)
    return time.monotonic() - began


def test_a_job_goes_on_without_a_lost_host_and_takes_it_back(tmp_path, capsys):
    if lack := missing():
        pytest.skip(lack)
    checkpoints = tmp_path / "checkpoints"
    with Network(3, tmp_path) as network:
        for host in network.hosts:
            start(host, "torchrun", network.hosts[0], checkpoints)
        wait_for(lambda: newest(checkpoints) >= 2 * EVERY, tmp_path, "two checkpoints of three hosts")
        assert starts(tmp_path) == [(0, 3)]
        network.hosts[2].cut()
        network.hosts[2].kill()
        saved = newest(checkpoints)
        lost_s = wait_for(lambda: len(starts(tmp_path)) == 2, tmp_path, "a start with two hosts")
        wait_for(lambda: newest(checkpoints) > starts(tmp_path)[1][0], tmp_path, "a checkpoint of two hosts")
        network.hosts[2].mend()
        start(network.hosts[2], "again", network.hosts[0], checkpoints)
        joined_s = wait_for(lambda: len(starts(tmp_path)) == 3, tmp_path, "a start with three hosts again")
        goal = starts(tmp_path)[2][0] + EVERY
        wait_for(lambda: newest(checkpoints) >= goal, tmp_path, "a checkpoint of three hosts again")
        logs = "\n".join(path.read_text() for path in tmp_path.glob("host[01]-*.log"))
    (_, first), (lost_at, second), (back_at, third) = starts(tmp_path)
    with capsys.disabled():
        print(f"\nhost2 lost: {second} processes went on from step {lost_at} (saved: {saved}) {lost_s:.0f} s later")
        print(f"host2 back: {third} processes went on from step {back_at} {joined_s:.0f} s later")
        print(next(line for line in logs.splitlines() if "DisagreementError: " in line))
    assert (first, second, third) == (3, 2, 3)
    assert lost_at >= saved  # at most the steps since the last checkpoint are lost
    assert "on host2)" in logs
