"""One rank of a run: its device, its process group, and the report of its failure.

Started by `command` as `python -m shardwise.train.worker OPTIONS`, or by torchrun through the command line.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
from torch._C._distributed_c10d import Store

from shardwise.comm import Comm, ProcessGroupComm
from shardwise.config import Config
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.machine import local_ranks
from shardwise.machine.local_ranks import FailureReport
from shardwise.machine.output import make_printable
from shardwise.train.folder import RunFolder
from shardwise.train.job import TrainJob, check_memory, prepare
from shardwise.train.loop import RankProcess
from shardwise.train.options import TrainOptions
from shardwise.train.run import run

TIMEOUT = timedelta(minutes=30)
LISTEN_S = 1.0
"""How long a rank that lost its connections waits for the rank that failed to report first."""
CONSEQUENCES = ("closed by peer", "connection", "gloo", "nccl", "timed out", "store")


def choose_device(wanted: str, rank: int) -> torch.device:
    """The device of this rank; on a GPU, the current one from here on."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU here; `shardwise env` shows what is missing")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _timeout(options: TrainOptions) -> timedelta:
    """The timeout of the configuration. An error in that is raised later, on all ranks alike."""
    with contextlib.suppress(ConfigError):
        seconds = Config.load(options.placing.config).runtime.timeout
        return timedelta(seconds=seconds) if seconds is not None else TIMEOUT
    return TIMEOUT


def serve(options: TrainOptions) -> NoReturn:
    """Run one rank, then exit the process."""
    rank, code = int(os.environ["RANK"]), 0
    store: Store | None = None
    try:
        process = RankProcess(choose_device(options.placing.device, rank))
        for number in local_ranks.stop_signals():
            signal.signal(number, lambda *_: setattr(process, "stop_requested", True))
        store = local_ranks.join(rank, process.device, _timeout(options))
        comm = ProcessGroupComm(None, torch.device("cpu"))
        run(_agreed_job(options, comm, process.device.type == "cpu"), process, comm)
    except ShardwiseError as error:
        code = 2
        report_failure(store, options, rank, str(error))
    except BaseException as error:
        code = 1
        report_failure(store, options, rank, f"rank {rank}: {type(error).__name__}: {error}")
    with contextlib.suppress(OSError):  # the terminal may be closed
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # destructors would wait for ranks that may have exited


def _agreed_job(options: TrainOptions, comm: Comm, on_cpu: bool) -> TrainJob:
    """Prepare the job on every rank. If one rank finds an error, all ranks raise the same."""
    job, error = None, None
    try:
        job = prepare(options, comm.world_size)
        check_memory(job, on_cpu, int(os.environ.get("LOCAL_WORLD_SIZE", comm.world_size)))
    except ConfigError as found:
        error = str(found)
    seen = comm.share_object((error, job and job.identity))
    for rank, (error, identity) in enumerate(seen):
        if error is not None:
            raise ConfigError(error if rank == 0 else f"rank {rank}: {error}")
        if identity != seen[0][1]:
            raise ConfigError(f"rank {rank} sees other data than rank 0: put the same files on every machine")
    assert job is not None
    return job


def report_failure(
    store: Store | None, options: TrainOptions, rank: int, message: str, listen_s: float = LISTEN_S
) -> None:
    """Report the exception being handled to the parent or, under torchrun, print it on the first rank that fails.

    The traceback goes to a file.
    """
    error = sys.exception()
    is_consequence = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in CONSEQUENCES)
    if not isinstance(error, ShardwiseError):
        path = RunFolder(options.outputs.out).error(rank)
        with contextlib.suppress(OSError):
            path.write_text(traceback.format_exc(), encoding="utf-8")
            message += f" (traceback: {path})"
    if options.debug:
        message += "\n" + traceback.format_exc()
    if folder := os.environ.get(local_ranks.FOLDER):
        FailureReport.write(Path(folder), rank, message, is_consequence)
        return
    if is_consequence:
        time.sleep(listen_s)
    if store is not None:
        with contextlib.suppress(Exception):  # the store may have ended with its rank
            if store.compare_set("shardwise/train/error", "", str(rank)) != str(rank).encode():
                return  # another rank was first
    print(f"error: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    local_ranks.stop_with_parent()
    make_printable()
    serve(TrainOptions.model_validate_json(sys.argv[1]))
