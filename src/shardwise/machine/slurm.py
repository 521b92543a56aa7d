"""Which rank a process is in a Slurm job, from the variables that `srun` sets."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
from collections.abc import Mapping
from typing import NamedTuple

from shardwise.errors import ConfigError

PORTS = range(20_000, 30_000)
"""Ports for the ranks to meet at: below those that systems give to outgoing connections."""


class SlurmTask(NamedTuple):
    """One task of a job step: its number in the step and on its node, and the nodes of the step.

    `gpus` are those of its node, `cpus` those of each task; 0 if the job asked for none.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    nodes: int
    first_host: str
    port: int
    gpus: int
    cpus: int

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> SlurmTask | None:
        """The task that this process is; None outside of a job step, also in the script of `sbatch` itself.

        >>> step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
        >>> step |= {"SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
        >>> task = SlurmTask.read(step)
        >>> task.rank, task.world_size, task.local_rank, task.local_world_size, task.first_host
        (3, 4, 1, 2, 'gpu07')
        """
        if not {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"} <= variables.keys():
            return None

        def of_step(name: str) -> str:
            return variables.get(f"SLURM_STEP_{name}") or variables[f"SLURM_{name}"]

        local, node = tasks_per_node(of_step("TASKS_PER_NODE")), int(variables["SLURM_NODEID"])
        number = 7919 * int(variables["SLURM_JOB_ID"]) + int(variables["SLURM_STEP_ID"])
        return cls(
            rank=int(variables["SLURM_PROCID"]),
            world_size=sum(local),
            local_rank=int(variables["SLURM_LOCALID"]),
            local_world_size=local[node],
            node=node,
            nodes=len(local),
            first_host=first_host(of_step("NODELIST")),
            port=PORTS[number % len(PORTS)],
            gpus=int(variables.get("SLURM_GPUS_ON_NODE", 0)),
            cpus=int(variables.get("SLURM_CPUS_PER_TASK", 0)),
        )

    def processes(self, asked: int | None) -> int | None:
        """How many ranks this task starts with torchrun, as asked or one for each GPU of its node; None if the task is
        one rank itself."""
        if asked is not None and self.local_world_size > 1:
            raise ConfigError(
                f"-n {asked}: Slurm has started {self.local_world_size} tasks on this node, and each of them is a "
                "rank: leave -n out, or start one task a node (--ntasks-per-node=1)"
            )
        return asked or (self.gpus if self.local_world_size == 1 and self.gpus > 1 else None)

    def torchrun_options(self, ranks: int, variables: Mapping[str, str]) -> list[str]:
        """What torchrun needs to start `ranks` processes on each node of this step."""
        address, port = self._meeting(variables)
        nodes = [f"--nnodes={self.nodes}", f"--node-rank={self.node}", f"--nproc-per-node={ranks}"]
        return [*nodes, f"--master-addr={address}", f"--master-port={port}"]

    def rank_variables(self, variables: Mapping[str, str]) -> dict[str, str]:
        """The variables of torchrun for a task that is one rank."""
        address, port = self._meeting(variables)
        numbers = {"RANK": self.rank, "WORLD_SIZE": self.world_size, "LOCAL_RANK": self.local_rank}
        numbers |= {"LOCAL_WORLD_SIZE": self.local_world_size, "GROUP_RANK": self.node}
        return {"MASTER_ADDR": address, "MASTER_PORT": port, **{name: str(value) for name, value in numbers.items()}}

    def _meeting(self, variables: Mapping[str, str]) -> tuple[str, str]:
        """Address and port at which the ranks of this step meet: MASTER_ADDR and MASTER_PORT if they are set."""
        address = variables.get("MASTER_ADDR") or find_address(self.first_host)
        return address, variables.get("MASTER_PORT") or str(self.port)


def srun_command(variables: Mapping[str, str]) -> list[str] | None:
    """The beginning of a command that runs in every task of the job whose script this process is; None elsewhere.

    >>> srun_command({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_CPUS_PER_TASK": "8"})
    ['srun', '--kill-on-bad-exit=1', '--cpus-per-task=8']
    """
    is_script = "SLURM_JOB_ID" in variables and "SLURM_STEP_ID" not in variables
    counts = (variables.get("SLURM_NTASKS", "1"), variables.get("SLURM_JOB_NUM_NODES", "1"))
    if not is_script or all(int(count) == 1 for count in counts):
        return None
    cpus = variables.get("SLURM_CPUS_PER_TASK")  # srun does not take it from the job
    return ["srun", "--kill-on-bad-exit=1", *([f"--cpus-per-task={cpus}"] if cpus else [])]


def tasks_per_node(text: str) -> list[int]:
    """The tasks on each node, in the order of the nodes.

    >>> tasks_per_node("8(x3),2")
    [8, 8, 8, 2]
    """
    counts: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(times or 1)
    return counts


def first_host(nodes: str) -> str:
    """The first host of a list of nodes as Slurm writes it.

    >>> first_host("gpu[07-12,40],login"), first_host("rack1-a,rack1-b"), first_host("r[1-2]n[03,05]")
    ('gpu07', 'rack1-a', 'r1n03')
    """
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", nodes)[0])


def find_address(node: str) -> str:
    """A name or address of a node that resolves here: its own name, or what Slurm knows of it."""
    with contextlib.suppress(OSError):
        socket.getaddrinfo(node, None)
        return node
    with contextlib.suppress(OSError):
        shown = subprocess.run(["scontrol", "show", "node", node], capture_output=True, text=True).stdout
        if found := re.search(r"\bNodeAddr=(\S+)", shown):
            return found[1]
    return node
