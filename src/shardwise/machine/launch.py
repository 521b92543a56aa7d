"""Starting processes well: how many threads each gets, and what this CPU needs to be told; `shardwise run`.

torchrun gives every process one thread (OMP_NUM_THREADS=1), which cripples updates on the host. Here the ranks of a
machine share its cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NoReturn

from shardwise.errors import ConfigError

SAFE_ISA = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
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
    """What to add to the environment of processes that multiply 16-bit matrices on this CPU."""
    return {} if set(SAFE_ISA) & set(os.environ) or bf16_products_work() else dict(SAFE_ISA)


def heap_environment() -> dict[str, str]:
    """What keeps glibc from giving freed memory back and asking for it again, page by page, in every step.

    For training on the CPU, where buffers of many MB come and go: measured, it saves 20 000 page faults a step of the
    26 M GPT under zero3. What is freed stays with the process, to be used again.
    """
    settings = {"MALLOC_MMAP_THRESHOLD_": 32 << 20, "MALLOC_TRIM_THRESHOLD_": 8 << 30, "MALLOC_TOP_PAD_": 64 << 20}
    return {key: str(value) for key, value in settings.items() if key not in os.environ}


@cache
def bf16_products_work() -> bool:
    """Whether a bf16 matrix product survives here; some virtual machines announce AMX and kill whoever uses it."""
    if "amx_bf16" not in _cpu_flags():
        return True
    result = subprocess.run([sys.executable, "-c", _BF16_PRODUCT], capture_output=True)
    return result.returncode == 0


def run(ranks: int, command: Sequence[str], threads: int | None = None) -> NoReturn:
    """Become torchrun with `ranks` processes of a script and its arguments, or of a module named after `-m`."""
    environment = run_environment(ranks, threads)
    arguments = run_command(ranks, command)
    os.execve(arguments[0], arguments, environment)


def run_command(ranks: int, command: Sequence[str]) -> list[str]:
    """The torchrun command line; a ConfigError if there is nothing to run.

    >>> run_command(2, ["-m", "json.tool"])[-4:]
    ['--standalone', '--nproc-per-node=2', '-m', 'json.tool']
    """
    if ranks < 1:
        raise ConfigError(f"-n {ranks}: at least one process is needed")
    if not command:
        raise ConfigError("nothing to run: name a script, as in `shardwise run -n 2 train.py`")
    if command[0] != "-m" and not Path(command[0]).is_file():
        raise ConfigError(f"there is no script {command[0]!r}")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*launcher, *command]


def run_environment(ranks: int, threads: int | None = None) -> dict[str, str]:
    """This environment with a thread count for each rank (one that is set already stays), and what the CPU needs."""
    added = matmul_environment()
    if threads is not None or "OMP_NUM_THREADS" not in os.environ:
        added["OMP_NUM_THREADS"] = str(threads or threads_per_rank(ranks))
    return {**os.environ, **added}


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())
