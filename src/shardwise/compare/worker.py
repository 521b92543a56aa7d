"""One rank of one row, in its own process: it builds the row's system and answers requests through a pipe.

Started as `python -m shardwise.compare.worker PIPE`. The job comes first; then requests are `(verb, arguments)` and
answers are plain data. An exception is sent as an answer, then the process exits. Memory and wire are measured by
observers of storages and collectives, never from shardwise's own ledger.
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
from collections import Counter
from datetime import timedelta
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any, cast

import torch

from shardwise.compare.job import SEED, CompareJob
from shardwise.compare.systems import System, make_system, whole_numel
from shardwise.machine import env
from shardwise.machine.local_ranks import join
from shardwise.machine.memory import process_memory
from shardwise.models import loading
from shardwise.observe.labels import Labelling, by_kind
from shardwise.observe.storage import StorageObserver
from shardwise.observe.wire import WireObserver, WireRecord
from shardwise.tensors import map_tensors

WARM_STEPS = 2
"""The first step creates the optimizer's state; DDP rearranges its buckets in the second."""
OBSERVED_STEPS = 2
TIMEOUT = timedelta(minutes=10)


class Worker:
    """The verbs of a rank: `observe`; or `build`, then `steps` any number of times, then `finish`."""

    def __init__(self, job: CompareJob) -> None:
        self.job = job
        self._next_step = 0

    def observe(self) -> dict[str, Any]:
        """Build a system and train it for a few steps under both observers; what they measured."""
        resting: dict[str, int] = {}

        def note_resting() -> None:
            # The update begins: all gradients are there, activations and buffers are not. Some systems update in parts.
            if is_warm and not resting:
                resting.update(merge_kinds(by_kind(memory.breakdown)))

        is_warm = False
        labelling = Labelling(names=False, before_update=note_resting)
        with (
            StorageObserver(self.job.device, label=labelling.label_new) as memory,
            WireObserver(control=is_control) as wire,
        ):
            before = memory.current_bytes
            system = self._make()
            system.watch_wire()
            system.label(labelling, memory)
            for step in range(WARM_STEPS):
                self._train_step(system, step)
            startup_peak_bytes = memory.peak_bytes - before
            gc.collect()
            memory.reset_peak()
            is_warm = True
            for step in range(WARM_STEPS, WARM_STEPS + OBSERVED_STEPS):
                wire.records.clear()
                self._train_step(system, step)
            labelling.detach()
            return {
                "peak_bytes": memory.peak_bytes - before,
                "peak_split_bytes": merge_kinds(by_kind(memory.breakdown_at_peak)),
                "startup_peak_bytes": startup_peak_bytes,
                "resting_bytes": {kind: resting[kind] for kind in ("weights", "grads", "optim")},
                "wire_bytes_per_step": wire_by_kind(wire),
                "expected_wire_bytes_per_step": system.expected_wire_bytes(),
                "peak_rss_bytes": process_memory().peak_bytes,
                "versions": env.versions(),
                "parameters": sum(whole_numel(param) for param in system.model.parameters()),
            }

    def build(self) -> dict[str, Any]:
        self.system = self._make()
        return {}

    def steps(self, lead: int, timed: int) -> dict[str, Any]:
        """Train `lead` steps, then `timed` steps with a timer; the seconds of each timed step and the losses of all.

        The timer does not wait for transfers that a step leaves pending, because training does not either: it counts
        those of the last leading step, and not those of the last timed step.
        """
        first = self._next_step
        self._next_step += lead + timed
        gc.collect()
        losses = [self._train_step(self.system, first + index) for index in range(lead)]
        timer = StepTimer(self.job.device)
        gc.disable()  # keeps Python's garbage collector out of timed steps
        for index in range(lead, lead + timed):
            losses.append(self._train_step(self.system, first + index))
            timer.tick()
        gc.enable()
        return {"step_s": timer.seconds(), "losses": [loss.item() for loss in losses]}

    def finish(self) -> dict[str, Any]:
        """The hash of the trained weights, and the peak memory of this process."""
        sha = hashlib.sha256()
        for tensor in self.system.weights():
            sha.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return {"weights_sha256": sha.hexdigest(), "peak_rss_bytes": process_memory().peak_bytes}

    def _make(self) -> System:
        torch.manual_seed(SEED)
        model, self._make_batch = loading.load(self.job.settings.model, str(self.job.device))
        return make_system(self.job, model)

    def _train_step(self, system: System, step: int) -> torch.Tensor:
        """Train one step; the mean loss over its micro-batches."""
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
        return cast(dict[str, Any], map_tensors(batch, lambda tensor: tensor.to(self.job.device)))


def is_control(record: WireRecord) -> bool:
    """Whether a message is control: norms, flags, counters (fp64, integers, single numbers). Data is fp32 or 16-bit."""
    is_data = record.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return not is_data or record.payload_bytes <= 8 * record.group_size


def wire_by_kind(wire: WireObserver) -> dict[str, int]:
    """Bytes sent in gathers, in reductions (an all-reduce is one), and in everything else, control included.

    A plain send counts as the kind that its group's description names, else as a gather.
    """
    totals: Counter[str] = Counter(gather=0, reduce=0, other=wire.control_sent_bytes)
    for record in wire.data:
        name = (record.group if "reduce" in record.group else "gather") if "send" in record.op else record.op
        is_reduce = "reduce" in name or "all_to_all" in name
        totals["gather" if "gather" in name else "reduce" if is_reduce else "other"] += record.sent_bytes
    return {**totals, "total": sum(totals.values())}


def merge_kinds(split: dict[str, int]) -> dict[str, int]:
    """Labels merged into the kinds of the placement table (`optim`: master copy and moments), activations, the rest."""
    return {
        **{kind: split[kind] for kind in ("weights", "grads", "activations")},
        "optim": split["master"] + split["moments"],
        "in_flight": split["in flight"] + split["other"],
    }


class StepTimer:
    """Seconds between ticks: host time on the CPU, time of the compute stream on CUDA, where the host runs ahead."""

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
        if not self._is_cuda:
            return [second - first for first, second in pairwise(self._ticks)]
        torch.cuda.synchronize()
        return [first.elapsed_time(second) / 1e3 for first, second in pairwise(self._ticks)]


def serve(connection: Connection) -> None:
    """Answer requests until the parent closes the pipe."""
    worker = Worker(connection.recv())
    job = worker.job
    if job.settings.deterministic:
        torch.use_deterministic_algorithms(True)
    if job.device.type == "cuda":
        torch.cuda.set_device(job.device)
    join(job.rank, job.device, TIMEOUT)
    while True:
        try:
            verb, arguments = connection.recv()
        except EOFError:
            return
        assert verb in ("observe", "build", "steps", "finish")
        connection.send({"value": getattr(worker, verb)(*arguments)})


def main() -> None:
    faulthandler.enable()  # a crash in a kernel writes its stack to the log
    connection = Connection(int(sys.argv[1]))
    code = 0
    try:
        serve(connection)
    except Exception as error:
        traceback.print_exc()
        is_input = isinstance(error, loading.WorkloadError)
        text = str(error) if is_input else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            connection.send({"error": text, "is_input": is_input})
        code = 1
    sys.stderr.flush()
    os._exit(code)  # destructors would wait for ranks that may have exited


if __name__ == "__main__":
    main()
