"""Runs that go on by themselves: after a crash, and with another number of processes."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from support import run_command

EXAMPLE = Path(__file__).parent.parent / "examples" / "elastic.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ENV = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
LIMIT_S = 90.0


class Node:
    """torchrun with one process, as on a machine of its own; nodes meet over `store`."""

    def __init__(self, name: str, folder: Path, store: dist.TCPStore) -> None:
        self.output = folder / name
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{store.port}", "--rdzv-id=run"]
        quickly = "--rdzv-conf=is_host=0,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=4"
        command = [*TORCHRUN, "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", *meeting, quickly]
        script = [EXAMPLE, "--dir", "checkpoints", "--steps", "1000000", "--every", "5"]
        with self.output.open("w") as output:
            self.agent = subprocess.Popen(
                [*command, *script],
                cwd=folder,
                env=os.environ | ENV | {"GLOO_SOCKET_IFNAME": "lo"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def vanish(self) -> None:
        """End the agent before its process, or it would start another."""
        if self.agent.poll() is None:
            pid = self.agent.pid
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            self.agent.kill()
            for child in map(int, children):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            self.agent.wait()


def starts(nodes: list[Node]) -> list[tuple[int, int]]:
    """At which step a run began, and with how many processes; the first start first."""
    lines = [
        line for node in nodes for line in re.findall(r"from step (\d+) on (\d) processes", node.output.read_text())
    ]
    return sorted((int(step), int(processes)) for step, processes in lines)


def wait_for_start(nodes: list[Node], processes: int, after: int) -> int:
    """The step after `after` at which a run began with so many processes."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for step, found in starts(nodes):
            if found == processes and step > after:
                return step
        time.sleep(0.1)
    shown = "\n".join(node.output.read_text() for node in nodes)
    pytest.fail(f"no start with {processes} processes after step {after} in {LIMIT_S:g} s:\n{shown}", pytrace=False)


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.programs
@pytest.mark.timeout(400)
def test_a_run_goes_on_by_itself_when_a_node_vanishes(tmp_path):
    """With one process instead of two, from the newest checkpoint: nobody starts anything."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    nodes = [Node(name, tmp_path, store) for name in ("first", "second")]
    try:
        before = wait_for_start(nodes, 2, after=-1)
        wait_for_checkpoint(tmp_path / "checkpoints", after=before)
        nodes[1].vanish()
        assert wait_for_start(nodes, 1, after=before) % 5 == 0
        assert nodes[0].agent.poll() is None
    finally:
        for node in nodes:
            node.vanish()


def wait_for_checkpoint(folder: Path, after: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not any(int(path.name[5:].split(".")[0]) > after for path in folder.glob("step-*")):
        assert time.monotonic() < deadline, f"no checkpoint after step {after}"
        time.sleep(0.05)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_crashed_run_goes_on_by_itself_and_then_with_other_ranks(tmp_path):
    """torchrun restarts all processes after one was killed; a later run has one more."""

    def run(processes, *words):
        torchrun = [*TORCHRUN, "--standalone", f"--nproc-per-node={processes}", "--max-restarts=1"]
        command = [*torchrun, EXAMPLE, "--dir", "checkpoints", *words]
        return run_command(command, cwd=tmp_path, timeout=250, env=ENV).stdout

    shown = run(2, "--steps", "6", "--every", "2", "--crash", "5")
    assert "from step 0 on 2 processes" in shown
    assert re.search(r"from step (2|4) on 2 processes\nended at step 6", shown)
    assert "from step 6 on 3 processes\nended at step 8" in run(3, "--steps", "8", "--every", "2")
