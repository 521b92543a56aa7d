"""One rank of one row, in a process of its own: builds, then does what the parent asks, and answers through a pipe.

Started as `python -m shardwise.compare.worker JOB PIPE`. Requests are `(verb, arguments)`, answers plain data.
An exception is an answer too, after which the process ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import hashlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from shardwise.compare.job import SEED, Job
from shardwise.compare.observed import observe
from shardwise.compare.systems import System, make_system
from shardwise.machine import env
from shardwise.models import loading
from shardwise.tensors import map_tensors


class Worker:
    """The verbs: `observe`, or else `build`, then `steps` as often as wanted, and `finish`."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.system: System | None = None
        self._next_step = 0

    def observe(self) -> dict[str, Any]:
        """Memory and wire of a few steps."""
        seen = observe(self.job, self._make, self._train_step)
        return {**seen, "peak_rss_bytes": peak_rss_bytes(), "versions": env.versions()}

    def build(self) -> dict[str, Any]:
        """Make the system ready to train."""
        self.system = self._make()
        return {}

    def steps(self, lead: int, timed: int) -> dict[str, Any]:
        """Train `lead` steps, then `timed` ones under the clock; seconds of each timed step, losses of all.

        The clock starts and stops in the middle of the flow, without waiting for what a step leaves under way: the
        last step's rest is not counted, and that of the last leading step is.
        """
        assert self.system is not None
        system, first = self.system, self._next_step
        self._next_step += lead + timed
        gc.collect()
        losses = [self._train_step(system, first + index) for index in range(lead)]
        clock = Clock(self.job.device)
        with _no_gc():
            for index in range(lead, lead + timed):
                losses.append(self._train_step(system, first + index))
                clock.tick()
        return {"step_s": clock.seconds(), "losses": [loss.item() for loss in losses]}

    def finish(self) -> dict[str, Any]:
        """The hash of the trained weights, and the most memory this process ever had."""
        assert self.system is not None
        sha = hashlib.sha256()
        for tensor in self.system.weights():
            sha.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return {"weights_sha256": sha.hexdigest(), "steps": self._next_step, "peak_rss_bytes": peak_rss_bytes()}

    def _make(self) -> System:
        torch.manual_seed(SEED)
        model, self._make_batch = loading.load(self.job.settings.model, str(self.job.device))
        return make_system(self.job, model)

    def _train_step(self, system: System, step: int) -> torch.Tensor:
        """One update; the mean loss over its micro-batches."""
        count = self.job.settings.accumulate
        total = torch.zeros((), device=self.job.device)
        for micro in range(count):
            is_last = micro == count - 1
            loss = system.forward(self._batch(step * count + micro), is_last)
            system.backward(loss, is_last)
            total += loss.detach() / count
            del loss
        system.update()
        return total

    def _batch(self, number: int) -> dict[str, Any]:
        batch = loading.arguments(self._make_batch, self.job.rank, number)
        moved: dict[str, Any] = map_tensors(batch, lambda tensor: tensor.to(self.job.device))
        return moved


class Clock:
    """Seconds between ticks: of the host on CPU, of the device's own stream on CUDA, where the host runs ahead."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._ticks: list[Any] = []
        self.tick()

    def tick(self) -> None:
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._ticks.append(event)
        else:
            self._ticks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        pairs = zip(self._ticks, self._ticks[1:], strict=False)
        if self._is_cuda:
            torch.cuda.synchronize()
            return [first.elapsed_time(second) / 1e3 for first, second in pairs]
        return [second - first for first, second in pairs]


def peak_rss_bytes() -> int | None:
    """The most resident memory this process had so far."""
    try:
        with open("/proc/self/status") as status:
            line = next(line for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return None
    return int(line.split()[1]) * 1024


@contextlib.contextmanager
def _no_gc() -> Iterator[None]:
    """Python's collector runs between turns, not in the middle of a timed step."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _start(job: Job) -> None:
    settings = job.settings
    torch.set_num_threads(job.threads)
    if settings.deterministic:
        torch.use_deterministic_algorithms(True)
    backend = "gloo"
    if settings.device == "cuda":
        torch.cuda.set_device(job.device)
        if settings.world_size <= torch.cuda.device_count():
            backend = "cpu:gloo,cuda:nccl"
    store = FileStore(job.store, settings.world_size)
    dist.init_process_group(
        backend, store=store, rank=job.rank, world_size=settings.world_size, timeout=timedelta(minutes=10)
    )


def serve(connection: Connection, job: Job) -> None:
    """Answer requests until the parent has no more."""
    _start(job)
    worker = Worker(job)
    verbs: dict[str, Callable[..., Any]] = {
        "observe": worker.observe, "build": worker.build, "steps": worker.steps, "finish": worker.finish
    }  # fmt: skip
    while True:
        try:
            verb, arguments = connection.recv()
        except EOFError:
            return
        connection.send({"value": verbs[verb](*arguments)})


def main() -> None:
    faulthandler.enable()  # a crash in a kernel leaves its stack in the log
    connection = Connection(int(sys.argv[2]))
    job = Job.from_json(sys.argv[1])
    code = 0
    try:
        serve(connection, job)
    except Exception as error:
        traceback.print_exc()
        is_input = isinstance(error, loading.WorkloadError)
        text = str(error) if is_input else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            connection.send({"error": text, "is_input": is_input})
        code = 1
    sys.stderr.flush()
    os._exit(code)  # other ranks may be gone: do not wait for them in destructors


if __name__ == "__main__":
    main()
