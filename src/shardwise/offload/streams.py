"""CUDA streams for offload: copies and updates that overlap the compute stream, ordered by events.

Besides the *compute stream* (the one that is current when the engine is called) a device has three:

- `h2d` copies from the host to the device,
- `update` runs the optimizer on what has arrived,
- `d2h` copies from the device to the host.

The host issues all work at once. Events order it on the device, and the host waits for none of them
(test_offload_gpu.test_the_host_never_waits).

Lifetime: torch's allocator hands freed memory to the next tensor of the stream that allocated it, and it knows nothing
of the other streams. All memory that these streams read or write is therefore allocated on the compute stream, and
freed only after the compute stream waits for the event that ends its last use (`Streams.free_after`). Freed earlier, a
buffer would be overwritten while a copy still reads it: test_offload_gpu.test_the_same_bits_as_on_the_device, and
without a GPU test_stream_order, which reports each wait of the engine that is left out.

Without CUDA, host and device are one memory: work runs where it is issued, and every event has happened.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in a sequence of asynchronous work."""

    def synchronize(self) -> None:
        """Block the host until it has happened."""

    def query(self) -> bool:
        """Whether it has happened."""


class _Past:
    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


FREED_LATER = 2
"""So many later frees are asked for before memory that another stream has used is freed."""
PAST: Event = _Past()
"""An event that has happened already."""


def now(device: torch.device) -> Event:
    """The event that ends all work issued so far to the current stream of `device`."""
    return PAST if device.type != "cuda" else torch.cuda.current_stream(device).record_event()


class Stream:
    """One CUDA stream, or nothing on the CPU. Work inside `with stream:` is issued to it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._contexts: list[Any] = []

    def __enter__(self) -> None:
        context = contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        context.__enter__()
        self._contexts.append(context)

    def __exit__(self, *details: Any) -> None:
        self._contexts.pop().__exit__(*details)

    def wait(self, *events: Event) -> None:
        """Make work that is issued to this stream from now on run after `events`."""
        for event in events:
            if self._stream is not None and isinstance(event, torch.cuda.Event):
                self._stream.wait_event(event)

    def mark(self) -> Event:
        """The event that ends all work issued so far to this stream."""
        return PAST if self._stream is None else self._stream.record_event()


class Streams:
    """The streams of one device, the bytes they copied, and the memory that is freed when they are done with it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.h2d, self.update, self.d2h = Stream(device), Stream(device), Stream(device)
        self.moved_bytes: Counter[str] = Counter()
        self._to_free: deque[tuple[Event, Callable[[], None]]] = deque()

    def now(self) -> Event:
        """The event that ends all work issued so far to the compute stream."""
        return now(self.device)

    def wait(self, event: Event) -> None:
        """Make work that is issued to the compute stream from now on run after `event`."""
        if isinstance(event, torch.cuda.Event):
            torch.cuda.current_stream(self.device).wait_event(event)

    def join(self) -> None:
        """Make the compute stream wait for everything that the other streams have been given."""
        for stream in (self.h2d, self.update, self.d2h):
            self.wait(stream.mark())

    def copy_to_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy from the host to the device, in the current stream."""
        target.copy_(source, non_blocking=True)
        self.moved_bytes["host to device"] += source.numel() * source.element_size()

    def copy_to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy from the device to the host, in the current stream."""
        target.copy_(source, non_blocking=True)
        self.moved_bytes["device to host"] += source.numel() * source.element_size()

    def free_after(self, event: Event, free: Callable[[], None]) -> None:
        """Call `free` once the compute stream waits for `event`: after more than `FREED_LATER` later calls.

        The compute stream would stall if it waited at once. The number bounds the memory that is kept meanwhile.
        """
        self._to_free.append((event, free))
        self.drain(FREED_LATER)

    def drain(self, most: int = 0) -> None:
        """Make the compute stream wait for the oldest pending frees and do them, until at most `most` are pending."""
        while len(self._to_free) > most:
            event, free = self._to_free.popleft()
            self.wait(event)
            free()
