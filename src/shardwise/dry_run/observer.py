"""What a dry run sees: the fake storages, what the allocator would reserve for them, and the operators on the tape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shardwise.comm import DONE
from shardwise.dry_run.allocator import CachingAllocator
from shardwise.dry_run.fakes import Fakes
from shardwise.dry_run.kernels import Kernels
from shardwise.engine.engine import Engine
from shardwise.observe import StorageObserver
from shardwise.observe.labels import Labelling
from shardwise.offload.pinned import HostMemory
from shardwise.offload.streams import Event, Stream, Streams
from shardwise.timing.tape import Mark, Tape, Uses

_SCRATCH = -1


class DryHostMemory(HostMemory):
    """Host memory that says when it allocates: in a dry run host and device are both on the CPU, and the observer tells
    them apart by it."""

    def __init__(self, tape: Tape | None = None) -> None:
        """With a `tape`, host and device are two, and it notes what passes between them."""
        super().__init__()
        self.is_allocating = False
        self._tape = tape

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self.is_allocating = True
        try:
            return super().zeros(numel, dtype)
        finally:
            self.is_allocating = False

    def streams(self, device: torch.device) -> Streams:
        return super().streams(device) if self._tape is None else DryStreams(device, self._tape)


class DryStream(Stream):
    """One stream of a tape."""

    def __init__(self, device: torch.device, tape: Tape, name: str) -> None:
        super().__init__(device)
        self._tape, self._name = tape, name

    def __enter__(self) -> None:
        context = self._tape.on(self._name)
        context.__enter__()
        self._contexts.append(context)

    def wait(self, *events: Event) -> None:
        for event in events:
            if isinstance(event, Mark):
                self._tape.wait(self._name, event.number)

    def mark(self) -> Event:
        return self._tape.mark(self._name)


class DryStreams(Streams):
    """The streams of a tape."""

    def __init__(self, device: torch.device, tape: Tape) -> None:
        super().__init__(device)
        self._tape = tape
        self.h2d, self.update, self.d2h = (DryStream(device, tape, name) for name in ("h2d", "update", "d2h"))

    def now(self) -> Event:
        return self._tape.mark()

    def wait(self, event: Event) -> None:
        if isinstance(event, Mark):
            event.wait()

    def copy_to_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with self._tape.paused():
            super().copy_to_device(target, source)
        self._tape.copy("up", source.nbytes, Uses((source,), (target,)))

    def copy_to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with self._tape.paused():
            super().copy_to_host(target, source)
        self._tape.copy("down", source.nbytes, Uses((source,), (target,)))


class DryObserver(StorageObserver):
    """Sees what the allocator of the foreseen device would see."""

    def __init__(
        self, kernels: Kernels, label: Callable[[torch.Tensor], str], mode: FakeTensorMode, tape: Tape
    ) -> None:
        self.tape, self._is_new = tape, False
        self.host = DryHostMemory(tape if kernels.name != "cpu" else None)
        # If the foreseen device is the CPU, host memory is part of it, as in a measurement.
        is_away = None if kernels.name == "cpu" else lambda: self.host.is_allocating
        super().__init__("cpu", (), label, kernels.granularity_bytes, is_away)
        self.allocator = CachingAllocator()
        self._scratch = kernels.scratch
        self._fakes = Fakes(mode, self.device)
        self.is_updating = False
        self.counts_tp, self.tp_bytes = False, 0

    def add_scratch(self, size_bytes: int) -> None:
        self.allocator.allocate(_SCRATCH, size_bytes)
        self.allocator.free(_SCRATCH)
        super().add_scratch(size_bytes)

    def reset_peak(self) -> None:
        super().reset_peak()
        self.allocator.reset_peak()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and skipping takes longer than the frequent answers below

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return self.device  # fake tensors ask for every operator, and the answer is always the same
        if func is torch.ops.aten._local_scalar_dense.default and self.is_updating:
            return 0  # the engine asks whether gradients overflowed: they did not
        if self.counts_tp and func.namespace == "_c10d_functional":
            self._note_tp(_sent_in_ring(func, args))
        if func.is_view and args[0].__class__ is FakeTensor:
            return self.run(func, args, kwargs or {})  # half of all operators; their storages are known
        result = super().__torch_dispatch__(func, types, args, kwargs)
        scratch = self._scratch.get(func)
        if scratch is not None:
            self.add_scratch(scratch(*args, **(kwargs or {})))
        if func.namespace == "aten":
            self.tape.add(func, args, kwargs or {}, result)
        return result

    def _add(self, storage: torch.UntypedStorage, label: str) -> Any:
        self._is_new = True
        try:
            return super()._add(storage, label)
        finally:
            self._is_new = False

    def _resized(self, entry: Any, nbytes: int) -> None:
        if not self._is_new:  # a buffer of the engine's; results of operators count with their kernels
            self.tape.allocate(nbytes - entry.nbytes)
        if entry.nbytes != nbytes and entry.nbytes:
            self.allocator.free(id(entry))
        if entry.nbytes != nbytes and nbytes:
            self.allocator.allocate(id(entry), nbytes)
        super()._resized(entry, nbytes)

    def _note_tp(self, sent_bytes: int) -> None:
        self.tp_bytes += sent_bytes
        if sent_bytes:  # two ranks send the half of what they have
            (self.tape.send("tp", "tp", 2 * sent_bytes, 2, "inner") or DONE).wait()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self._fakes.run(func, args, kwargs)

    def _lies_here(self, tensor: torch.Tensor) -> bool:
        return True  # all tensors are fake ones on the CPU; to ask each for its device would take long


def _sent_in_ring(func: Any, args: Any) -> int:
    """What a collective of torch's sends from one rank, in a ring."""
    name, tensor = func.__name__.partition(".")[0], args[0]
    if not isinstance(tensor, torch.Tensor) or name == "wait_tensor":
        return 0
    sizes = [arg for arg in args[1:] if isinstance(arg, int)]
    count = sizes[0] if sizes else dist.get_world_size()
    if name.startswith("all_gather"):
        return tensor.nbytes * (count - 1)
    times = 2 if name.startswith("all_reduce") else 1
    return times * tensor.nbytes * (count - 1) // count


class LogitsLabelling(Labelling):
    """Labels tensors as wide as the vocabulary as logits instead of activations."""

    def __init__(self) -> None:
        super().__init__(names=False)
        self._vocabulary: int | None = None

    def attach_model(self, observer: StorageObserver, engine: Engine) -> None:
        """Label what the engine's model and optimizer hold from here on."""
        tables = [module for module in engine.module.modules() if isinstance(module, nn.Embedding)]
        self._vocabulary = max((table.num_embeddings for table in tables), default=None)
        self.attach_engine(observer, engine)
        for unit in engine.units:
            if (part := unit.weights.resting_part) is not None:
                self.label("weights", unit.name, part)

    def label_new(self, tensor: torch.Tensor) -> str:
        kind = super().label_new(tensor)
        is_wide = self._vocabulary is not None and tensor.ndim > 1 and tensor.shape[-1] == self._vocabulary
        return "logits" if is_wide and kind in ("activations", "in flight") else kind
