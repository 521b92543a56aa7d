"""Host memory and the streams of offload in a dry run: nothing is copied, and a tape notes what would be."""

from __future__ import annotations

import torch

from shardwise.offload.pinned import HostMemory
from shardwise.offload.streams import Event, Stream, Streams
from shardwise.timing.tape import Mark, Tape, Uses


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
