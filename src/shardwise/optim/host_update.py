"""The update of a unit where its states rest: by torch's kernels for the CPU, in a thread beside the one that issues.

What goes to the device afterwards are the weights alone, in the dtype that computes. They rest where the gradients
were, which the update has read: the same memory, until the next gradients come. So an element that is updated here
costs 4 bytes on the way, down and up, and one that is updated on the device 28.

Kernels for the CPU round other than those for the device: the results agree to a few units in the last place of fp32,
not in every bit. On the CPU itself they are the same kernels, and nothing runs beside anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.offload.streams import PAST, Event, Stream, Streams, now
from shardwise.offload.unit_states import GRADS, MASTER, Bucket, UnitStates
from shardwise.optim.host_share import take_cores
from shardwise.optim.optimizers import twin
from shardwise.optim.streamed_update import adopt, check_none_frozen, options_now
from shardwise.profiling import mark
from shardwise.unit.unit import Unit

if TYPE_CHECKING:
    from shardwise.optim.updater import Updater


class HostWorker:
    """What works on the host: one thread, an optimizer like the user's for it alone, and a lane for results.

    The thread steps on parameters of its own over the same memory, with the same states: whatever is done to the
    user's optimizer meanwhile (options, `zero_grad`, `load_state_dict`), it is not in its way.
    """

    def __init__(self, updater: Updater, device: torch.device) -> None:
        self.given = updater.optimizer
        self.updater = updater.beside(twin(updater.optimizer))
        self.lane = Stream(device)
        self.issuing = threading.Lock()
        """Two threads may deliver, this one and the one that issues."""
        self._thread = (
            ThreadPoolExecutor(1, "shardwise-update", _begin_thread, (device,)) if _works_beside(device) else None
        )
        self.begun: set[str] = set()
        """Units that it has updated before."""
        self._room = torch.empty(0)
        self._told: StepScalars | None = None

    def do(self, work: Callable[[], None]) -> Future[None]:
        """Do it after all that was asked before."""
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

    def told(self, coefficient: torch.Tensor | None, overflow: torch.Tensor | None) -> StepScalars:
        """The same for all units of a step: what the device found out is on its way to the host once."""
        asked = (coefficient, overflow)
        if self._told is None or any(old is not new for old, new in zip(self._told.asked, asked, strict=True)):
            self._told = StepScalars.ask(*asked)
        return self._told

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()


@dataclass
class StepScalars:
    """What the host has to know of a step, and when it does."""

    asked: tuple[torch.Tensor | None, torch.Tensor | None]
    coefficient: torch.Tensor | None
    overflow: torch.Tensor | None
    event: Event

    @classmethod
    def ask(cls, coefficient: torch.Tensor | None, overflow: torch.Tensor | None) -> StepScalars:
        asked = (coefficient, overflow)
        told = [None if value is None else _to_host(value) for value in asked]
        devices = [value.device for value in asked if value is not None]
        return cls(asked, told[0], told[1], now(devices[0]) if devices else PAST)

    def skips(self) -> bool:
        return self.overflow is not None and bool(self.overflow.item())


class HostedUpdate:
    """One unit's update on the host in one step, and then where its new weights are."""

    def __init__(self, hands: HostWorker, unit: Unit, states: UnitStates, told: StepScalars) -> None:
        check_none_frozen(unit)
        adopt(hands.given, unit)
        self._hands, self._unit, self._states, self._told = hands, unit, states, told
        self._groups = [options_now(group) for group in hands.given.param_groups]
        self._piece_states = [hands.given.state.get(piece, {}) for _, piece in unit.weights.pieces]
        self._at_rest = states.at_rest
        self._made = states.fresh(unit.weights.policy.weight_dtype)
        self._read: Event = PAST
        self._done = hands.do(self._work)
        if unit.name not in hands.begun:
            # The first makes the states, which are given room where they rest.
            hands.begun.add(unit.name)
            self._done.result()
            self._keep_states()

    def deliver(self, target: torch.Tensor | None) -> HostedArrival:
        """Bring the new weights to `target` as soon as they are made, whoever finds that they are."""
        streams = self._states.offload.streams
        arrival = HostedArrival(streams, self._done)
        if target is not None:
            streams.moved_bytes["host to device"] += target.numel() * target.element_size()
            begun = streams.now()
            self._done.add_done_callback(lambda done: self._bring(target, begun, arrival))
        else:
            arrival.issued.set()
        return arrival

    def finish(self) -> Event:
        """Have the host wait until the update is made; when the last delivery has read it."""
        self._done.result()
        return self._read

    def _bring(self, target: torch.Tensor, begun: Event, arrival: HostedArrival) -> None:
        hands = self._hands
        try:
            with hands.issuing:
                hands.lane.wait(begun)
                with hands.lane:
                    target.copy_(self._made, non_blocking=True)
                self._read = arrival.event = hands.lane.mark()
        except BaseException as error:
            arrival.error = error
        arrival.issued.set()

    def _keep_states(self) -> None:
        given = self._hands.given
        for (_, piece), state in zip(self._unit.weights.pieces, self._piece_states, strict=True):
            if state:
                given.state[piece] = state
        adopt(given, self._unit)
        self._hands.updater.account_for(self._unit)

    @torch.no_grad()
    def _work(self) -> None:
        for event in (self._told.event, *self._at_rest):
            event.synchronize()
        skips = self._told.skips()
        with mark("update", self._unit.name):
            for bucket in self._states.buckets:
                if not skips:
                    self._update(bucket)
                if self._made is not self._master:
                    self._made[bucket.span.slice].copy_(self._master[bucket.span.slice])

    def _update(self, bucket: Bucket) -> None:
        weights, span = self._unit.weights, bucket.span
        grads = self._states.on_host(GRADS)[span.slice]
        if grads.dtype != torch.float32:
            grads = self._hands.room(span.numel).copy_(grads)
        if self._told.coefficient is not None:
            grads.mul_(self._told.coefficient)
        groups: list[list[nn.Parameter]] = [[] for _ in self._groups]
        states = self._hands.updater.optimizer.state
        for number in bucket.pieces:
            group, piece = weights.pieces[number]
            own = nn.Parameter(piece.data)
            own.grad = grads[weights.piece_spans[number].shift(-span.start).slice].view(piece.shape)
            groups[group].append(own)
            states[own] = self._piece_states[number]
            _steps_to_host(states[own])
        try:
            self._hands.updater.step_pieces(groups, self._groups)
        finally:
            states.clear()

    @property
    def _master(self) -> torch.Tensor:
        return self._states.on_host(MASTER)


@dataclass
class HostedArrival:
    """A delivery of what the host makes; a handle as those of `comm` are."""

    streams: Streams
    done: Future[None]
    event: Event = PAST
    error: BaseException | None = None
    issued: threading.Event = field(default_factory=threading.Event)

    def issue(self) -> None:
        """Have the host wait until the copy is issued, and the work lane come after it."""
        self.done.result()
        self.issued.wait()
        if self.error is not None:
            raise self.error
        self.streams.update.wait(self.event)

    def wait(self) -> None:
        self.issue()
        self.streams.wait(self.event)


def hosted(unit_bytes: Sequence[int], share: float) -> list[bool]:
    """Which units the host updates, so that it has `share` of them at any point of the order, as nearly as may be.

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


def can_host(states: UnitStates | None) -> bool:
    """Whether everything that an update reads and writes rests on the host."""
    return states is not None and states.holds_states and MASTER in states and GRADS in states


def _works_beside(device: torch.device) -> bool:
    """Whether the host has something else to do than the device."""
    return device.type == "cuda"


def _to_host(value: torch.Tensor) -> torch.Tensor:
    is_away = value.device.type == "cuda"
    return torch.empty_like(value, device="cpu", pin_memory=is_away).copy_(value, non_blocking=True)


def _steps_to_host(state: dict[str, Any]) -> None:
    """Counts that a kernel on the device has kept there."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and not value.ndim and value.device.type != "cpu":
            state[key] = value.cpu()


def _begin_thread(device: torch.device) -> None:
    take_cores()
    if device.type == "cuda":
        torch.cuda.set_device(device)  # else it would hold a context on the first one
