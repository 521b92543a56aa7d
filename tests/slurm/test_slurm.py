"""`shardwise run` in a Slurm cluster of two nodes: srun, sbatch, and a job that is requeued (`make test-slurm`)."""

import re
import sys
import time
from pathlib import Path

import pytest

from support.slurm import SlurmCluster, missing

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "elastic.py"
RUN = [sys.executable, "-m", "shardwise", "run"]
ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": ":".join(filter(None, sys.path))}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if lack := missing():
        pytest.skip(lack)
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def say(capsys, text: str) -> None:
    with capsys.disabled():
        print(f"\n{text}", flush=True)


def test_srun_starts_ranks_without_any_option(cluster, tmp_path, capsys):
    words = ["srun", "--nodes=2", "--ntasks-per-node=2", "--kill-on-bad-exit=1", *RUN, EXAMPLE]
    shown = cluster.run(*words, "--dir", tmp_path, "--steps", 4, "--every", 2, timeout=300, env=ENV)
    say(capsys, f"srun, two tasks on each of two nodes: {shown.strip()}")
    assert "from step 0 on 4 processes" in shown
    assert "ended at step 4" in shown


def test_one_task_a_node_starts_several_ranks(cluster, tmp_path, capsys):
    words = ["srun", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", *RUN, "-n", 2, EXAMPLE]
    shown = cluster.run(*words, "--dir", tmp_path, "--steps", 4, "--every", 2, timeout=300, env=ENV)
    say(capsys, f"srun, torchrun with two ranks on each of two nodes: {shown.strip()}")
    assert "from step 0 on 4 processes" in shown


def test_a_requeued_job_continues(cluster, tmp_path, capsys):
    """The script of sbatch starts itself in every task; after a requeue it loads the newest checkpoint."""
    output, folder = tmp_path / "job.out", tmp_path / "checkpoints"
    variables = ENV | {"PYTHON": sys.executable, "CHECKPOINTS": str(folder)}
    words = ["sbatch", "--parsable", f"--chdir={ROOT}", f"--output={output}", ROOT / "examples" / "slurm.sh"]
    job = cluster.run(*words, "--steps", 200, "--every", 5, "--pause", 0.2, env=variables).strip()
    wait_for(lambda: newest(folder) >= 10, output)
    before = newest(folder)
    cluster.run("scontrol", "requeue", job)
    wait_for(lambda: cluster.state(job)["JobState"] == "PENDING", output)
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")  # not two minutes later
    wait_for(lambda: len(starts(output)) == 2, output)
    steps = starts(output)
    state = cluster.state(job)
    say(capsys, f"job {job} requeued after checkpoint {before}: restarts {state['Restarts']}, starts at steps {steps}")
    assert steps[0] == 0
    assert before <= steps[1] < 200
    assert state["Restarts"] == "1"
    cluster.run("scancel", job)
    wait_for(lambda: not cluster.run("squeue", "-h").strip(), output)  # its processes have ended


def newest(folder: Path) -> int:
    """The step of the newest complete checkpoint."""
    return max([int(path.name[5:]) for path in folder.glob("step-*") if path.name[5:].isdigit()], default=0)


def starts(output: Path) -> list[int]:
    text = output.read_text() if output.exists() else ""
    return [int(step) for step in re.findall(r"from step (\d+) on 2 processes", text)]


def wait_for(is_so, output: Path) -> None:
    deadline = time.monotonic() + 300
    while not is_so():
        assert time.monotonic() < deadline, output.read_text() if output.exists() else "the job wrote nothing"
        time.sleep(0.2)
