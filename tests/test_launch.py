"""`shardwise run`: torchrun with a sensible thread count, the tasks of Slurm, and Kubernetes."""

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import yaml

from shardwise.engine.initialize import _warn_of_tasks
from shardwise.errors import ConfigError, ConfigWarning
from shardwise.machine import launch, slurm
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


# Slurm

STEP = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "2",
    "SLURM_NTASKS": "99",  # the job's: the step's own are others
    "SLURM_TASKS_PER_NODE": "33(x3)",
    "SLURM_JOB_NODELIST": "login,gpu[07-09]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),1",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "MASTER_ADDR": "10.0.0.7",
}


@pytest.fixture
def started(monkeypatch, tmp_path):
    """What `launch.run` becomes with other variables: the command line and the environment."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "cores", lambda: 16)
    monkeypatch.setattr(launch.shutil, "which", lambda program, path: f"/bin/{program}")

    def start(variables, ranks=None):
        seen = []
        monkeypatch.setattr(os, "environ", variables | {"ONEDNN_MAX_CPU_ISA": "X"})
        monkeypatch.setattr(os, "execve", lambda program, arguments, environment: seen.append((arguments, environment)))
        launch.run(ranks, ["train.py", "--lr", "1"])
        return seen[0]

    return start


def test_a_task_of_slurm_is_a_rank(started):
    arguments, environment = started(STEP | {"SLURM_CPUS_PER_TASK": "3"})
    assert arguments == [sys.executable, "train.py", "--lr", "1"]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    assert [environment[name] for name in names] == ["6", "9", "2", "4", "10.0.0.7", "3"]
    assert 20_000 <= int(environment["MASTER_PORT"]) < 30_000
    assert started(STEP)[1]["OMP_NUM_THREADS"] == "4"  # a share of 16 cores for 4 tasks
    later = started(STEP | {"SLURM_STEP_ID": "3"})[1]
    assert later["MASTER_PORT"] != environment["MASTER_PORT"]


@pytest.mark.parametrize(("gpus", "asked", "ranks"), [("8", None, 8), ("0", 4, 4), ("8", 2, 2)])
def test_one_task_a_node_starts_a_rank_for_each_gpu(started, gpus, asked, ranks):
    node = {"SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "MASTER_PORT": "29500"}
    arguments, environment = started(STEP | node | {"SLURM_GPUS_ON_NODE": gpus}, asked)
    nodes = ["--nnodes=3", "--node-rank=1", f"--nproc-per-node={ranks}", "--master-addr=10.0.0.7"]
    assert arguments[1:] == ["-m", "torch.distributed.run", *nodes, "--master-port=29500", "train.py", "--lr", "1"]
    assert "RANK" not in environment


def test_ranks_are_not_started_twice(started):
    with pytest.raises(ConfigError, match="-n 4: Slurm has started 4 tasks on this node, and each of them is a rank"):
        started(STEP, 4)


def test_the_script_of_a_job_starts_itself_in_every_task(started):
    script = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NUM_NODES": "2"}
    arguments, _ = started(script)
    assert arguments[:2] == ["srun", "--kill-on-bad-exit=1"]
    assert arguments[2:] == [sys.executable, "-m", "shardwise", "run", "--", "train.py", "--lr", "1"]
    assert "--standalone" in started(script, 2)[0]  # asked for here
    assert "--standalone" in started(script | {"SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"})[0]


def test_a_node_whose_name_does_not_resolve_is_looked_up(monkeypatch):
    shown = SimpleNamespace(stdout="NodeName=gpu07 Arch=x86_64\n   NodeAddr=10.1.2.3 NodeHostName=gpu07\n")
    monkeypatch.setattr(slurm.socket, "getaddrinfo", mock.Mock(side_effect=OSError))
    monkeypatch.setattr(slurm.subprocess, "run", lambda *words, **options: shown)
    assert slurm.find_address("gpu07") == "10.1.2.3"
    monkeypatch.setattr(slurm.subprocess, "run", mock.Mock(side_effect=FileNotFoundError))
    assert slurm.find_address("gpu07") == "gpu07"


def test_tasks_that_each_train_by_themselves_are_warned(monkeypatch):
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(ConfigWarning, match="9 tasks of Slurm run this script, and each trains by itself"):
        _warn_of_tasks()


# Kubernetes

MANIFEST = Path(__file__).parent.parent / "examples" / "trainjob.yaml"


def test_the_manifest_for_kubernetes_starts_the_example():
    manifest = yaml.safe_load(MANIFEST.read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = manifest["spec"]["trainer"]
    script = MANIFEST.parent / Path(trainer["command"][-1]).name
    options = set(re.findall(r'add_argument\("(--\w+)"', script.read_text()))
    assert options >= {word for word in trainer["args"] if word.startswith("--")}
    (patch,) = manifest["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert mounts["checkpoints"] == trainer["args"][trainer["args"].index("--dir") + 1]


@pytest.mark.full
def test_the_manifest_for_kubernetes_follows_the_published_schema():
    models = pytest.importorskip("kubeflow_trainer_api.models")
    manifest = yaml.safe_load(MANIFEST.read_text())
    assert models.TrainerV1alpha1TrainJob.from_dict(manifest).to_dict() == manifest  # an unknown key is left out
    manifest["spec"]["trainer"]["numNode"] = 1
    assert models.TrainerV1alpha1TrainJob.from_dict(manifest).to_dict() != manifest


def test_the_page_on_scale_names_what_there_is():
    root = MANIFEST.parent.parent
    page = (root / "docs" / "scale.md").read_text()
    examples = set(re.findall(r"examples/[\w.]+\w", page))
    assert len(examples) >= 4
    assert all((root / path).is_file() for path in examples)
    targets = re.findall(r"^([\w-]+):.*##", (root / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"`make ([\w-]+)`", page)) <= set(targets)
