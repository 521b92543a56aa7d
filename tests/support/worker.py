"""One rank: an interpreter that joins the process group once and then runs the functions it is sent.

Started by `support.pool` as `python -m support.worker <pickled Setup in hex>`. It ends when pytest does: the kernel
kills it with its parent (Linux), and a closed pipe ends its loop.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _pytest.config import get_config

from support.groups import destroy_extra_groups
from support.matrix import only_import
from support.protocol import Job, Ready, Reply, Setup, receive, send

PR_SET_PDEATHSIG = 1
# Longer than any test may take: a rank that waits in vain is for the harness to report, with every rank's stack.
GROUP_TIMEOUT = timedelta(minutes=60)


def main() -> None:
    started = time.monotonic()
    setup: Setup = pickle.loads(bytes.fromhex(sys.argv[1]))
    end_with_parent(setup.parent_pid)
    stacks = open(setup.stacks_path, "w")  # noqa: SIM115  (held open for the signal handler)
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    torch.set_num_threads(1)
    rewrite_asserts()
    only_import()
    if setup.init:
        join_group(setup)
    reset_torch()
    freeze()
    connection = Connection(setup.fd)
    send(connection, Ready(time.monotonic() - started))
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            message = receive(connection)
            if isinstance(message, Job):
                reply = run(message, setup)
                gc.collect()
                send(connection, reply)
            else:
                destroy_extra_groups()
    # No orderly shutdown: peers may be gone, and pytest has all it wants.
    os._exit(0)


def end_with_parent(parent_pid: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)  # the parent died before the line above


def freeze() -> None:
    """What is alive now stays alive: the collection after each test need not walk all of torch."""
    gc.collect()
    gc.freeze()


def rewrite_asserts() -> None:
    """Let `assert a == b` in a test module show both sides, as it does under pytest."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    get_config().parse(["-c", os.devnull, "--rootdir", os.getcwd(), "--noconftest"])


def join_group(setup: Setup) -> None:
    store = dist.TCPStore("127.0.0.1", setup.port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=setup.rank, world_size=setup.world_size, timeout=GROUP_TIMEOUT)


def run(job: Job, setup: Setup) -> Reply:
    try:
        with clean_state():
            function, args, kwargs = load(job)
            value = function(setup.rank, setup.world_size, *args, **kwargs)
        if setup.init and not dist.is_initialized():
            raise RuntimeError("the test destroyed the default process group of shared workers; use fresh=True")
        return Reply(value=pickle.dumps(value))
    except pytest.skip.Exception as skip:
        return Reply(skipped=str(skip))
    except BaseException as error:
        return Reply(error=format_error(error))


def load(job: Job) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    sys.path[:] = job.path
    new = job.module not in sys.modules
    function = getattr(importlib.import_module(job.module), job.name)
    if new:
        freeze()
    args, kwargs = pickle.loads(job.args)
    return getattr(function, "rank_function", function), args, kwargs


@contextlib.contextmanager
def clean_state() -> Iterator[None]:
    """Every test starts from the same seeds, modes and environment, and leaves them so."""
    reset_torch()
    environ, folder = dict(os.environ), os.getcwd()
    try:
        with warnings.catch_warnings():
            yield
    finally:
        os.environ.clear()
        os.environ.update(environ)
        os.chdir(folder)
        reset_torch()


def reset_torch() -> None:
    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)
    torch.set_autocast_enabled("cpu", False)


def format_error(error: BaseException) -> str:
    """The traceback from the test's own frame on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))


if __name__ == "__main__":
    main()
