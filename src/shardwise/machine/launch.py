"""The environment of rank processes (threads, heap, CPU instructions), and `shardwise run`.

torchrun gives every process one thread (OMP_NUM_THREADS=1), which slows down updates on the host. Here the ranks of a
machine share its cores.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NoReturn

from shardwise.checks import check_range
from shardwise.errors import ConfigError
from shardwise.machine.slurm import SlurmTask, srun_command

SAFE_ISA = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
LEAST_LIMIT = 128
RANKS_PER_CORE = 8
"""How many processes per core a machine may be asked to start; LEAST_LIMIT on few cores."""
_BF16_PRODUCT = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); print((x @ x).sum().item())"


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_rank(ranks: int) -> int:
    """An equal share of the cores, at least one.

    >>> threads_per_rank(10**6)
    1
    """
    return max(1, cores() // ranks)


def matmul_environment() -> dict[str, str]:
    """Variables for processes that multiply 16-bit matrices on this CPU; empty if it needs none."""
    return {} if set(SAFE_ISA) & set(os.environ) or bf16_products_work() else dict(SAFE_ISA)


def heap_environment() -> dict[str, str]:
    """Variables that make glibc keep freed memory for reuse instead of returning it to the system in every step.

    They are for training on the CPU, which allocates and frees buffers of many MB. On the 26 M GPT under zero3 they
    save 20 000 page faults a step.
    """
    settings = {"MALLOC_MMAP_THRESHOLD_": 32 << 20, "MALLOC_TRIM_THRESHOLD_": 8 << 30, "MALLOC_TOP_PAD_": 64 << 20}
    return {key: str(value) for key, value in settings.items() if key not in os.environ}


@cache
def bf16_products_work() -> bool:
    """Whether bf16 matrix products work here. Some virtual machines report AMX but kill processes that use it."""
    if "amx_bf16" not in cpu_field("flags").split():
        return True
    return subprocess.run([sys.executable, "-c", _BF16_PRODUCT], capture_output=True).returncode == 0


def run(
    ranks: int | None,
    command: Sequence[str],
    threads: int | None = None,
    variables: Mapping[str, str] | None = None,
) -> NoReturn:
    """Replace this process by torchrun with `ranks` processes of a script, or of a module named after `-m`.

    In a task of Slurm, it becomes a rank of the job step, or starts those of its node; in the script of a Slurm job, it
    starts itself in every task.
    """
    task, srun = SlurmTask.read(os.environ), srun_command(os.environ)
    if task is None and srun is not None and ranks is None:
        check_command(command)
        own = ["run", *([f"--threads={threads}"] if threads is not None else []), "--", *command]
        run_program([*srun, sys.executable, "-m", "shardwise", *own], variables or {})
    if task is not None:
        arguments, environment = run_task(task, ranks, command, threads)
    else:
        arguments, environment = run_command(ranks or 1, command), run_environment(ranks or 1, threads)
    os.execve(arguments[0], arguments, {**environment, **(variables or {})})


def run_task(
    task: SlurmTask, ranks: int | None, command: Sequence[str], threads: int | None
) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment of one task of a Slurm step."""
    check_command(command)
    started = task.processes(ranks)
    if started is None:
        threads = threads or task.cpus or None
        environment = run_environment(task.local_world_size, threads) | task.rank_variables(os.environ)
        return [sys.executable, *command], environment
    check_ranks("-n", started)
    return torchrun(task.torchrun_options(started, os.environ), command), run_environment(started, threads)


def run_program(command: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """Replace this process by a command with `variables` added to the environment."""
    environment = {**os.environ, **matmul_environment(), **variables}
    program = shutil.which(command[0], path=environment.get("PATH"))
    if program is None:
        raise ConfigError(f"there is no script or command {command[0]!r}")
    os.execve(program, list(command), environment)


def is_script(command: Sequence[str]) -> bool:
    """Whether a command is a script or module for torchrun, and not a program of its own."""
    return not command or command[0] == "-m" or Path(command[0]).suffix == ".py"


def run_command(ranks: int, command: Sequence[str]) -> list[str]:
    """The torchrun command line. Raises a ConfigError if there is nothing to run.

    >>> run_command(2, ["-m", "json.tool"])[-4:]
    ['--standalone', '--nproc-per-node=2', '-m', 'json.tool']
    """
    check_ranks("-n", ranks)
    check_command(command)
    return torchrun(["--standalone", f"--nproc-per-node={ranks}"], command)


def torchrun(options: Sequence[str], command: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *options, *command]


def check_command(command: Sequence[str]) -> None:
    """Raise a ConfigError if there is nothing to run."""
    if not command:
        raise ConfigError("nothing to run: name a script, as in `shardwise run -n 2 train.py`")
    if command[0] != "-m" and not Path(command[0]).is_file():
        raise ConfigError(f"there is no script {command[0]!r}")


def check_ranks(option: str, ranks: int) -> None:
    """Raise a ConfigError for a number of processes that this machine cannot mean."""
    if ranks < 1:
        raise ConfigError(f"{option} {ranks}: at least one process is needed")
    check_range(option, ranks, most=max(LEAST_LIMIT, RANKS_PER_CORE * cores()))


def run_environment(ranks: int, threads: int | None = None) -> dict[str, str]:
    """This environment plus the thread count of each rank, unless OMP_NUM_THREADS is set, and what the CPU needs."""
    added = matmul_environment()
    if threads is not None or "OMP_NUM_THREADS" not in os.environ:
        added["OMP_NUM_THREADS"] = str(threads or threads_per_rank(ranks))
    return {**os.environ, **added}


def cpu_field(name: str) -> str:
    """A field of the first processor in /proc/cpuinfo; empty if there is none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""
