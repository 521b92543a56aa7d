"""`shardwise train`: checks the options, then starts local ranks, or runs as one of torchrun's."""

from __future__ import annotations

import os
import shutil
import signal
import sys

from shardwise.machine import launch
from shardwise.machine.local_ranks import LocalRanks
from shardwise.train.folder import RunFolder, check_resume, check_tensorboard
from shardwise.train.job import check_memory, prepare
from shardwise.train.options import TrainOptions


def run(options: TrainOptions) -> None:
    """Train, and exit with the run's exit code."""
    if "RANK" in os.environ:
        from shardwise.train.worker import serve

        serve(options)
    gpus = 0 if options.placing.device == "cpu" else count_gpus()
    world_size = options.placing.nproc or gpus or 2
    if not _check(options, world_size, on_cpu=not gpus):
        return
    code = run_ranks(options, world_size, on_cpu=not gpus)
    if code:
        raise SystemExit(code)


def count_gpus() -> int:
    """The GPUs of this machine. Imports torch, which takes seconds, only if there may be one."""
    if not (os.path.exists("/proc/driver/nvidia") or shutil.which("nvidia-smi")):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def run_ranks(options: TrainOptions, world_size: int, on_cpu: bool) -> int:
    """Start the ranks and wait for them; the exit code. Rank 0 writes to our standard output."""
    environment = launch.run_environment(world_size) | (launch.heap_environment() if on_cpu else {})
    environment |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    command = [sys.executable, "-m", "shardwise.train.worker", options.model_dump_json()]
    with LocalRanks("train") as ranks, ranks.stopping_on_signals():
        for rank in range(world_size):
            ranks.start(command, environment | {"LOCAL_RANK": str(rank)}, **({"stdout": None} if rank == 0 else {}))
        ranks.wait()
        return report(ranks)


def report(ranks: LocalRanks) -> int:
    """Print why the ranks ended, if they did not finish, as one message; the exit code."""
    if ranks.stop_requests > 1:
        print("ended at once: what was trained since the last checkpoint is lost", file=sys.stderr)
        return 130
    if ranks.stop_requests and -signal.SIGTERM in ranks.exit_codes:
        print("stopped before the first step")  # the signal came before the ranks could handle it
        return 0
    code, message = ranks.failure() or (0, "")
    if code:
        print(f"error: {message}", file=sys.stderr)
    return code


def _check(options: TrainOptions, world_size: int, on_cpu: bool) -> bool:
    """Raise a ConfigError for wrong options before processes start. False if the run is already finished."""
    launch.check_ranks("--nproc", world_size)
    job = prepare(options, world_size)
    check_memory(job, on_cpu, local_ranks=world_size)
    check_resume(options.outputs.resume)
    folder = RunFolder(options.outputs.out)
    folder.open()
    if options.outputs.tensorboard:
        check_tensorboard()
    if options.outputs.fresh:
        return True
    folder.check(job.identity)
    if (done := folder.finished_steps()) >= job.steps:
        print(f"{folder.root} is finished: {done} steps are done. --steps {2 * done} continues, --fresh starts over.")
        return False
    return True
