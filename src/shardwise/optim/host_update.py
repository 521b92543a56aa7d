"""The update of a unit on the host, where its states rest: torch's kernels for the CPU, in a thread of their own.

Only the weights then travel to the device, in the dtype that computes. They are written where the gradients were, which
the update has read: the same memory, until the next gradients arrive. So an element that is updated here costs 4 bytes
on the way, down and up, and one that is updated on the device 28.

Kernels for the CPU round differently from those for the device: the results agree to a few units in the last place of
fp32, not in every bit. On the CPU itself they are the same kernels, and there is no thread.

Host and device may share an update so that both end at the same time. `host_share` measures the shares at the start,
with both busy, because they share the bandwidth of the host's memory.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.comm import Comm
from shardwise.offload.offloaded_states import OffloadedStates
from shardwise.offload.pinned import page_locked
from shardwise.offload.streams import PAST, Event, Stream, Streams, now
from shardwise.offload.unit_states import GRADS, MASTER, Bucket
from shardwise.optim.piece_optimizer import PieceOptimizer, options_now
from shardwise.optim.states import offload_moments
from shardwise.profiling import mark
from shardwise.unit import Unit

_NUMEL = 1 << 24
_MEASURED_S = 0.25
_STREAMED_BYTES = 14
"""What an element sends each way when it is updated on the device: master, two moments, and its gradient once."""


def host_share(comm: Comm) -> float:
    """The host's share, the same on all ranks. On the CPU, host and device are one: a half each."""
    if comm.device.type != "cuda":
        return 0.5
    shares: list[float] = comm.share_object(_measured(comm.device), "the host's share of updates")
    return round(sum(shares) / len(shares), 2)


def balanced(host_rate: float, device_rate: float) -> float:
    """The share of a host that updates `host_rate` elements in a second.

    >>> balanced(1e9, 3e9)
    0.25
    """
    return host_rate / (host_rate + device_rate)


def use_cores() -> None:
    """Limit torch to this rank's share of the cores, less one for the thread that issues work."""
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, cores - 1))


def _measured(device: torch.device) -> float:
    copy, update = _copies(device), _host_update()
    copy()
    rates: list[float] = []

    def measure() -> None:
        use_cores()
        rates.append(_rate(update))

    thread = threading.Thread(target=measure)
    thread.start()
    device_rate = _rate(copy)
    thread.join()
    return balanced(rates[0], device_rate)


def _rate(work: Callable[[], None]) -> float:
    """Elements in a second, without the first turn, which starts threads."""
    work()
    started, turns = time.perf_counter(), 0
    while (passed_s := time.perf_counter() - started) < _MEASURED_S:
        work()
        turns += 1
    return turns * _NUMEL / passed_s


def _copies(device: torch.device) -> Callable[[], None]:
    streams = Streams(device)
    numel = _NUMEL * _STREAMED_BYTES // 4
    here, there = torch.empty(numel, device=device), torch.empty(numel, device=device)
    source, target = page_locked(numel, torch.float32), page_locked(numel, torch.float32)
    streams.h2d.wait(now(device))
    streams.d2h.wait(now(device))

    def copy() -> None:
        with streams.h2d:
            here.copy_(source, non_blocking=True)
        with streams.d2h:
            target.copy_(there, non_blocking=True)
        streams.h2d.mark().synchronize()
        streams.d2h.mark().synchronize()

    return copy


def _host_update() -> Callable[[], None]:
    piece = torch.nn.Parameter(torch.zeros(_NUMEL))
    grads, weights = (torch.zeros(_NUMEL, dtype=torch.bfloat16) for _ in range(2))
    optimizer = torch.optim.AdamW([piece], fused=True)
    piece.grad = torch.zeros(_NUMEL)

    def update() -> None:
        with torch.no_grad():
            assert piece.grad is not None
            piece.grad.copy_(grads)
            optimizer.step()
            weights.copy_(piece)

    return update


class HostWorker:
    """One thread, an optimizer like the user's for it alone, and a stream for its results.

    The thread steps on parameters of its own over the same memory, with the same states: what happens to the user's
    optimizer meanwhile (options, `zero_grad`, `load_state_dict`) does not interfere.
    """

    def __init__(self, optimizer: PieceOptimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        self.twin = optimizer.for_thread()
        self.stream = Stream(device)
        self.issuing = threading.Lock()
        """Both this thread and the main one may issue transfers."""
        self._thread = (
            ThreadPoolExecutor(1, "shardwise-update", _begin_thread, (device,)) if _works_beside(device) else None
        )
        self.begun: set[str] = set()
        """Units that it has updated before."""
        self._room = torch.empty(0)
        self._scalars: StepScalars | None = None

    def do(self, work: Callable[[], None]) -> Future[None]:
        """Do it after all work that was given before."""
        if self._thread is not None:
            return self._thread.submit(work)
        done: Future[None] = Future()
        work()
        done.set_result(None)
        return done

    def room(self, numel: int) -> torch.Tensor:
        """Room in fp32 for what the thread works on."""
        if self._room.numel() < numel:
            self._room = torch.empty(numel)
        return self._room[:numel]

    def scalars(self, coefficient: torch.Tensor | None, overflow: torch.Tensor | None) -> StepScalars:
        """The scalars of a step, copied to the host once for all its units."""
        on_device = (coefficient, overflow)
        known = self._scalars
        if known is None or any(old is not new for old, new in zip(known.on_device, on_device, strict=True)):
            known = self._scalars = StepScalars.copy(*on_device)
        return known

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()


@dataclass
class StepScalars:
    """What the host has to know of a step, valid after `event`."""

    on_device: tuple[torch.Tensor | None, torch.Tensor | None]
    coefficient: torch.Tensor | None
    overflow: torch.Tensor | None
    event: Event

    @classmethod
    def copy(cls, coefficient: torch.Tensor | None, overflow: torch.Tensor | None) -> StepScalars:
        on_device = (coefficient, overflow)
        on_host = [None if value is None else _to_host(value) for value in on_device]
        devices = [value.device for value in on_device if value is not None]
        return cls(on_device, on_host[0], on_host[1], now(devices[0]) if devices else PAST)

    def skips(self) -> bool:
        return self.overflow is not None and bool(self.overflow.item())


class HostedUpdate:
    """One unit's update on the host in one step, and then where its new weights are."""

    def __init__(self, worker: HostWorker, unit: Unit, states: OffloadedStates, scalars: StepScalars) -> None:
        optimizer = worker.optimizer.optimizer
        offload_moments(optimizer, unit)
        self._worker, self._unit, self._states, self._scalars = worker, unit, states, scalars
        self._groups = [options_now(group) for group in optimizer.param_groups]
        self._piece_states = [optimizer.state.get(piece.param, {}) for piece in unit.weights.pieces]
        self._in_flight = states.in_flight  # the gradients are copied to the host by then: `_work` waits for it
        self._new_weights = states.new_weights(unit.weights.policy.weight_dtype)
        self._read: Event = PAST
        self._done = worker.do(self._work)
        if unit.name not in worker.begun:
            # The first update makes the moments, which then get their storages.
            worker.begun.add(unit.name)
            self._done.result()
            self._store_moments()

    def transfer(self, target: torch.Tensor | None) -> HostArrival:
        """Copy the new weights to `target` as soon as they are made; the thread that makes them issues the copy."""
        streams = self._states.streams
        arrival = HostArrival(streams, self._done)
        if target is not None:
            streams.moved_bytes["host to device"] += target.numel() * target.element_size()
            begun = streams.now()  # earlier readers of `target` on the compute stream are done
            self._done.add_done_callback(lambda done: self._copy(target, begun, arrival))
        else:
            arrival.issued.set()
        return arrival

    def finish(self) -> Event:
        """Block the host until the update is made; returns when the last transfer has read it."""
        self._done.result()
        return self._read

    def _copy(self, target: torch.Tensor, begun: Event, arrival: HostArrival) -> None:
        worker = self._worker
        try:
            with worker.issuing:
                worker.stream.wait(begun)
                with worker.stream:
                    target.copy_(self._new_weights, non_blocking=True)
                self._read = arrival.event = worker.stream.mark()
        except BaseException as error:
            arrival.error = error
        arrival.issued.set()

    def _store_moments(self) -> None:
        optimizer = self._worker.optimizer
        for piece, state in zip(self._unit.weights.pieces, self._piece_states, strict=True):
            if state:
                optimizer.optimizer.state[piece.param] = state
        offload_moments(optimizer.optimizer, self._unit)
        self._worker.twin.account_for(self._unit)  # nothing of it is on the device: step counts are kept on the host

    @torch.no_grad()
    def _work(self) -> None:
        for event in (self._scalars.event, *self._in_flight):
            event.synchronize()
        skips, master = self._scalars.skips(), self._states.on_host(MASTER)
        with mark("update", self._unit.name):
            for bucket in self._states.buckets:
                if not skips:
                    self._update(bucket)
                if self._new_weights is not master:
                    self._new_weights[bucket.span.slice].copy_(master[bucket.span.slice])

    def _update(self, bucket: Bucket) -> None:
        span, optimizer = bucket.span, self._worker.twin
        grads = self._states.on_host(GRADS)[span.slice]
        if grads.dtype != torch.float32:
            grads = self._worker.room(span.numel).copy_(grads)
        if self._scalars.coefficient is not None:
            grads.mul_(self._scalars.coefficient)
        params: list[list[nn.Parameter]] = [[] for _ in self._groups]
        states = optimizer.optimizer.state
        for number in bucket.pieces:
            piece = self._unit.weights.pieces[number]
            own = nn.Parameter(piece.param.data)
            own.grad = grads[piece.span.shift(-span.start).slice].view(piece.param.shape)
            params[piece.group].append(own)
            states[own] = self._piece_states[number]
            _steps_to_host(states[own])
        try:
            optimizer.step(params, self._groups)
        finally:
            states.clear()


@dataclass
class HostArrival:
    """A transfer of new weights that the host makes."""

    streams: Streams
    done: Future[None]
    event: Event = PAST
    error: BaseException | None = None
    issued: threading.Event = field(default_factory=threading.Event)

    def following(self) -> contextlib.AbstractContextManager[None]:
        """Blocks the host until the copy is issued."""
        self._await_issue()
        self.streams.update.wait(self.event)
        return self.streams.update

    def wait(self) -> None:
        self._await_issue()
        self.streams.wait(self.event)

    def _await_issue(self) -> None:
        self.done.result()
        self.issued.wait()
        if self.error is not None:
            raise self.error


def hosted(unit_bytes: Sequence[int], share: float) -> list[bool]:
    """Which units the host updates, so that it has `share` of them at any point of the order, as nearly as possible.

    >>> hosted([10, 10, 10, 10, 10, 10], 1 / 3)
    [False, True, False, False, True, False]
    """
    chosen, passed, taken = [], 0, 0
    for size in unit_bytes:
        passed += size
        is_taken = taken + size / 2 <= share * passed if share < 1 else True
        taken += size * is_taken
        chosen.append(is_taken)
    return chosen


def _works_beside(device: torch.device) -> bool:
    """Whether the host is idle while the device computes, so that a thread pays."""
    return device.type == "cuda"


def _to_host(value: torch.Tensor) -> torch.Tensor:
    is_away = value.device.type == "cuda"
    return torch.empty_like(value, device="cpu", pin_memory=is_away).copy_(value, non_blocking=True)


def _steps_to_host(state: dict[str, Any]) -> None:
    """Move step counts that a kernel on the device has kept there."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and not value.ndim and value.device.type != "cpu":
            state[key] = value.cpu()


def _begin_thread(device: torch.device) -> None:
    use_cores()
    if device.type == "cuda":
        torch.cuda.set_device(device)  # otherwise the thread would create a context on the first device
