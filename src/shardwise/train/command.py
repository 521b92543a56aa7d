"""What `shardwise train` does in the process that was started: check, then start ranks, or be one of torchrun's."""

from __future__ import annotations

import os
import shutil
import sys

from shardwise.train.crew import Crew
from shardwise.train.folder import Folder
from shardwise.train.job import prepare
from shardwise.train.options import Options

DEFAULT_RANKS = 2


def run(options: Options) -> None:
    """Train as `options` say, and leave with the run's exit code."""
    if "RANK" in os.environ:
        from shardwise.train.worker import serve

        serve(options)
    gpus = 0 if options.placing.device == "cpu" else count_gpus()
    world_size = options.placing.nproc or gpus or DEFAULT_RANKS
    if not _check(options, world_size):
        return
    code = Crew(options, world_size, on_cpu=not gpus).run()
    if code:
        raise SystemExit(code)


def count_gpus() -> int:
    """The GPUs of this machine. torch is asked, which takes seconds to load, only where there may be one."""
    if not (os.path.exists("/proc/driver/nvidia") or shutil.which("nvidia-smi")):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _check(options: Options, world_size: int) -> bool:
    """Find what is wrong before processes are started; whether there is anything left to train."""
    job = prepare(options, world_size)
    folder = Folder(options.outputs.out)
    folder.open()
    if options.outputs.tensorboard:
        from shardwise.train.metrics import check_tensorboard

        check_tensorboard()
    if options.outputs.fresh:
        return True
    folder.check(job.identity)
    if (done := folder.finished_steps()) >= job.steps:
        print(f"{folder.root} is finished: {done} steps are done. --steps {2 * done} trains on, --fresh starts over.")
        sys.stdout.flush()
        return False
    return True
