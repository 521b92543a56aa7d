"""`shardwise.stream`: a model that computes with weights that rest on the host, on the disk and on other ranks.

It is a placement without gradients and optimizer: the units, buffers, streams, collectives and the ledger of training,
driven by the same schedule. Who owns what, and on which stream:

- The weights of a unit rest in pinned host memory, or in the files that they came from (`offload.weight_files`), or on
  the device. Nothing writes to them.
- A unit that does not rest on the device gets a buffer there when it is fetched. The buffer is allocated and freed by
  the compute stream; the `h2d` stream fills it, after an event that ends the compute stream's last use of that memory.
  The compute stream waits for the end of the copy before the unit's first kernel. So a copy runs beside computations
  that do not use its memory (tests/test_stream_gpu.py with poisoned buffers).
- The schedule fetches `WeightPlacement.ahead` units before their use, from the last unit on to the first of the next
  pass (`schedule.inference`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.comm import Comm
from shardwise.config.sections import Offload, Precision
from shardwise.engine.access import Access
from shardwise.engine.assembly import build_units
from shardwise.engine.module_guard import ModuleGuard
from shardwise.engine.root_call import RootCall
from shardwise.memory import Ledger
from shardwise.memory.placement import WeightPlacement
from shardwise.offload.context import OffloadContext, host_memory
from shardwise.offload.weight_files import WeightFiles
from shardwise.profiling import Clock
from shardwise.schedule import Prefetch, Schedule, ScheduleEvents
from shardwise.schedule.inference import generate_together
from shardwise.sizes import format_bytes
from shardwise.unit import Unit
from shardwise.unit.plan import UnitPlan

ATTRIBUTE = "shardwise_stream"
"""The attribute of a model under which its `WeightStream` is found."""


@dataclass(frozen=True)
class StreamReport:
    """What the passes of a stream have fetched and held, on this rank.

    `foreseen_peak_bytes` is the most that weights, and what `batch` and `context` need, take on the device;
    `weights_peak_bytes` what weights took, and `measured_peak_bytes` the allocator's peak, on CUDA.
    """

    passes: int
    fetched_bytes: int
    resident_units: int
    units: int
    tier_bytes: dict[str, int]
    foreseen_peak_bytes: int
    weights_peak_bytes: int
    measured_peak_bytes: int | None

    @property
    def fetched_bytes_a_pass(self) -> float:
        return self.fetched_bytes / max(1, self.passes)

    def __str__(self) -> str:
        rests = ", ".join(f"{format_bytes(size)} on the {tier}" for tier, size in self.tier_bytes.items())
        measured = self.measured_peak_bytes
        peak = f"{format_bytes(measured)} measured" if measured is not None else "not measured on this device"
        return (
            f"{self.resident_units} of {self.units} units rest on the device ({rests}); "
            f"{self.passes} passes, {format_bytes(round(self.fetched_bytes_a_pass))} fetched in each; "
            f"device peak {format_bytes(self.foreseen_peak_bytes)} foreseen, {peak}"
        )


class WeightStream:
    """The weights of one model while it is streamed, at `model.shardwise_stream`. A context that ends with `close`."""

    def __init__(
        self,
        model: nn.Module,
        plans: list[UnitPlan],
        placement: WeightPlacement,
        precision: Precision,
        comm: Comm,
        files: Sequence[str] = (),
        working_bytes: int = 0,
    ) -> None:
        self.placement = placement
        self.comm = comm
        self.passes = 0
        self._working_bytes = working_bytes
        self._ledger = Ledger.from_environment()
        settings, device = Offload(), comm.device
        numel = sum(plan.layout.shard_numel for plan in plans if plan.policy.weights_tier != "device")
        self._offload = OffloadContext(device, self._ledger, settings, numel, host_memory(settings, device))
        # Of a model that is dropped without `close`, everything is freed by its destructor: not before the copies that
        # are under way have ended, which the allocator does not know of.
        weakref.finalize(self, self._offload.streams.join).atexit = False
        if files:
            largest = max(unit.shard_bytes for unit in placement.units)
            self._offload.weight_files = WeightFiles(list(files), largest, self._ledger, self._offload.host)
        self.units = build_units(plans, model, comm, self._offload, self._on_read)
        # What rests on the device needs no hooks: they would cost the host as much as a few kernels of each unit.
        moving = [unit for unit in self.units if unit.weights.policy.weights_sharded]
        self._schedule = Schedule(model, moving, Prefetch(placement.ahead), Clock(), _EVENTS)
        self._schedule.inference.begin((), placement.ahead)
        self._access = Access(model, self.units)
        self._guard = ModuleGuard(model, _do_nothing)
        self._root_call = RootCall(model, precision, device, self._schedule, self._computing)
        if comm.world_size > 1 and hasattr(model, "generate"):
            kind: Any = type(model)
            vars(model)["generate"] = partial(generate_together, partial(kind.generate, model), comm.world_size)
        self._model = weakref.ref(model)
        setattr(model, ATTRIBUTE, self)
        self._is_closed = False

    def __enter__(self) -> WeightStream:
        return self

    def __exit__(self, *details: Any) -> None:
        self.close()

    def report(self) -> StreamReport:
        """What was fetched and held so far."""
        device = self.comm.device
        return StreamReport(
            passes=self.passes,
            fetched_bytes=self._offload.streams.moved_bytes["host to device"],
            resident_units=self.placement.resident_units,
            units=len(self.units),
            tier_bytes=self._ledger.by_tier(),
            foreseen_peak_bytes=self.foreseen_peak_bytes,
            weights_peak_bytes=self._ledger.by_tier(at_peak=True).get("device", 0),
            measured_peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        )

    @property
    def foreseen_peak_bytes(self) -> int:
        """The most that weights, and what was set aside for the passes, take on the device."""
        return self.placement.device_bytes + self._working_bytes

    def close(self) -> None:
        """Take the stream off the model, and free its buffers, pinned memory and files. The model's parameters are
        then empty. A collective if there are several ranks."""
        if self._is_closed:
            return
        self._is_closed = True
        self.comm.begin_close()
        self._schedule.inference.end()
        self._schedule.remove()
        self._access.remove()
        self._root_call.remove()
        self._guard.remove()
        for unit in self.units:
            unit.free()
        self._offload.close()
        self.comm.close()
        model = self._model()
        if model is not None:
            vars(model).pop(ATTRIBUTE, None)

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the model is a plain one

    @contextlib.contextmanager
    def _computing(self, *inputs: Any) -> Iterator[None]:
        """Around a pass."""
        self.passes += 1
        with torch.no_grad():
            yield

    def _on_read(self, unit: Unit) -> bool:
        return self._schedule.forward.read(unit)


class StreamedModel(nn.Module):
    """What `stream` returns, for type checkers: the model that was given, of its own class, with its `WeightStream`."""

    shardwise_stream: WeightStream
    generate: Callable[..., Any]
    """Of models of transformers that generate."""


def _do_nothing() -> None:
    pass


def _refuse_backward() -> None:
    raise RuntimeError("a streamed model has no gradients: train it with shardwise.initialize")


_EVENTS = ScheduleEvents(
    begins=_refuse_backward,
    reduces=lambda: False,
    reduced=lambda unit: None,
    check_plain_backward=_refuse_backward,
    broken_backward=_do_nothing,
    ended=_do_nothing,
    last_unit=_do_nothing,
)
