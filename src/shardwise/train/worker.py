"""One rank: where it computes, how it finds the others, and how its failure is told once.

Started by `crew` as `python -m shardwise.train.worker OPTIONS`, or by torchrun through the command line.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store
from torch.distributed.rendezvous import rendezvous

from shardwise.comm.comm import Comm, ProcessGroupComm
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.train import crew
from shardwise.train.folder import Folder
from shardwise.train.job import Job, prepare
from shardwise.train.options import Options
from shardwise.train.run import run

TIMEOUT = timedelta(minutes=30)
LISTENING_S = 1.0
"""How long a rank that lost the others waits for one of them to tell why."""
CONSEQUENCES = ("closed by peer", "connection", "gloo", "nccl", "timed out", "store")


@dataclass
class Place:
    """This rank among the others. `stop` is set by a signal."""

    rank: int
    world_size: int
    device: torch.device
    stop: bool = False

    @classmethod
    def of(cls, options: Options) -> Place:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        wanted = options.placing.device
        if wanted == "cuda" and not torch.cuda.is_available():
            raise ConfigError("--device cuda: torch sees no GPU here; `shardwise env` tells what is missing")
        if wanted == "cpu" or not torch.cuda.is_available():
            return cls(rank, world_size, torch.device("cpu"))
        local = int(os.environ.get("LOCAL_RANK", rank))
        device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return cls(rank, world_size, device)

    def watch_signals(self) -> None:
        for number in crew.stopping():
            signal.signal(number, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        self.stop = True


def join(place: Place) -> Store:
    """Start the process group, through our crew's folder or torchrun's rendezvous; the store of all ranks."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", place.world_size))
    shared = place.device.type == "cuda" and local > torch.cuda.device_count()  # NCCL wants a GPU for each rank
    backend = "cpu:gloo,cuda:nccl" if place.device.type == "cuda" and not shared else "gloo"
    store: Store
    if folder := os.environ.get(crew.FOLDER):
        store = FileStore(str(Path(folder) / "store"), place.world_size)
    else:
        store, _, _ = next(iter(rendezvous("env://")))
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=TIMEOUT)
    return store


def serve(options: Options) -> NoReturn:
    """Be one rank of a run, to the end of the process."""
    rank, code = int(os.environ["RANK"]), 0
    store: Store | None = None
    try:
        place = Place.of(options)
        place.watch_signals()
        store = join(place)
        comm = ProcessGroupComm(None, torch.device("cpu"))
        run(_agreed_job(options, comm), place, comm)
    except ShardwiseError as error:
        code = 2
        _tell(store, options, rank, str(error))
    except BaseException as error:
        code = 1
        _tell(store, options, rank, f"rank {rank}: {type(error).__name__}: {error}")
    with contextlib.suppress(OSError):  # of a terminal that is gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # other ranks may be gone: do not wait for them in destructors


def _agreed_job(options: Options, comm: Comm) -> Job:
    """Every rank looks at its own machine; if one finds something wrong, all say the same."""
    job, error = None, None
    try:
        job = prepare(options, comm.world_size)
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


def _tell(store: Store | None, options: Options, rank: int, message: str) -> None:
    """Say what went wrong if nobody has; the traceback goes to a file."""
    error = sys.exception()
    is_consequence = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in CONSEQUENCES)
    if not isinstance(error, ShardwiseError):
        path = Folder(options.outputs.out).error(rank)
        with contextlib.suppress(OSError):
            path.write_text(traceback.format_exc())
            message += f" (traceback: {path})"
    if options.debug:
        message += "\n" + traceback.format_exc()
    if folder := os.environ.get(crew.FOLDER):
        crew.LastWords.write(Path(folder), rank, message, is_consequence)
        return
    if is_consequence:
        time.sleep(LISTENING_S)
    if store is None or _is_first(store, rank):
        print(f"error: {message}", file=sys.stderr, flush=True)


def _is_first(store: Store, rank: int) -> bool:
    with contextlib.suppress(Exception):  # the store may be gone with its rank
        return bool(store.compare_set("shardwise/train/error", "", str(rank)) == str(rank).encode())
    return True


if __name__ == "__main__":
    crew.leave_with_parent()
    serve(Options.model_validate_json(sys.argv[1]))
