"""A Slurm cluster of two nodes on this machine, without systemd: its own munged, slurmctld and one slurmd a node.

Needs root and Debian's packages slurm-wlm and munge. Everything is in one folder and ends with the context.
"""

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}({address})
SlurmUser=root
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={munge}/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
KillWait=5
JobRequeue=1
RequeueExit=75
NodeName=node[0-1] NodeHostname={host} NodeAddr={address} Port=[{ports[1]}-{ports[2]}] CPUs=2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """What this machine lacks to have such a cluster; None if it can."""
    if os.geteuid() != 0:
        return "slurmd needs root"
    lacking = [program for program in PROGRAMS if _find(program) is None]
    return f"{', '.join(lacking)} not found: apt-get install slurm-wlm munge" if lacking else None


class SlurmCluster:
    """Use as a context manager; `environment` is for the commands of Slurm."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._munge = Path("/run") / f"munge-{os.getpid()}"
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def __enter__(self) -> Self:
        try:
            self._start_munge()
            self._start_slurm()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        while self._processes:
            process = self._processes.pop()
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        shutil.rmtree(self._munge, ignore_errors=True)

    def run(self, *words: object, timeout: float = 60.0, env: Mapping[str, str] | None = None) -> str:
        """What a command of Slurm prints. Fails if the command does."""
        done = subprocess.run(
            [str(word) for word in words],
            env={**self.environment, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, f"{words}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def state(self, job: str) -> dict[str, str]:
        """The fields that `scontrol show job` prints."""
        shown = self.run("scontrol", "show", "job", job)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def _start(self, name: str, *words: object) -> None:
        with (self.folder / f"{name}.out").open("wb") as out:
            command = [str(word) for word in words]
            self._processes.append(subprocess.Popen(command, env=self.environment, stdout=out, stderr=out))

    def _start_munge(self) -> None:
        """With a key of its own, as the user of Debian's package: munged refuses folders that others can write to."""
        folder, user = self._munge, pwd.getpwnam("munge")
        folder.mkdir(mode=0o755)
        (folder / "key").write_bytes(os.urandom(128))
        for path in (folder, folder / "key"):
            os.chown(path, user.pw_uid, user.pw_gid)
        (folder / "key").chmod(0o400)
        names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={folder / name}" for option, name in names.items()]
        self._start(
            "munged",
            "setpriv",
            f"--reuid={user.pw_uid}",
            f"--regid={user.pw_gid}",
            "--clear-groups",
            _find("munged"),
            "--foreground",
            *options,
        )
        _wait_for(lambda: (folder / "socket").exists(), "munged", self.folder / "munged.out")

    def _start_slurm(self) -> None:
        for name in ("state", "spool-node0", "spool-node1"):
            (self.folder / name).mkdir()
        text = CONFIGURATION.format(
            host=socket.gethostname().partition(".")[0],
            address="127.0.0.1",
            ports=_free_ports(),
            folder=self.folder,
            munge=self._munge,
        )
        (self.folder / "slurm.conf").write_text(text)
        configuration = ("-D", "-f", self.folder / "slurm.conf")
        self._start("slurmctld", _find("slurmctld"), *configuration)
        for node in ("node0", "node1"):
            self._start(node, _find("slurmd"), *configuration, "-N", node)
        _wait_for(self._is_up, "the nodes", self.folder / "slurmctld.log")

    def _is_up(self) -> bool:
        shown = subprocess.run(["sinfo", "-hN", "-o", "%T"], env=self.environment, capture_output=True, text=True)
        return shown.stdout.split() == ["idle", "idle"]


def _find(program: str) -> str | None:
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")


def _free_ports() -> list[int]:
    """Three that follow each other."""
    for first in range(17001, 19000, 3):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + 3):
                stack.enter_context(socket.socket()).bind(("", port))
            return [first, first + 1, first + 2]
    raise OSError("no three free ports")


def _wait_for(is_there, what: str, log: Path) -> None:
    deadline = time.monotonic() + 60
    while not is_there():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not start:\n{log.read_text() if log.exists() else ''}")
        time.sleep(0.2)
