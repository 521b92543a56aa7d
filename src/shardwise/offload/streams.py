"""Streams: work that runs beside the stream that computes, and the events that put it in order.

There are three: *up* copies from the host to the device, *down* copies back, *work* computes on what has arrived. All
are issued at once and wait for each other on the device; the host waits for none of them. Memory that a lane reads or
writes is allocated by the stream that computes, and is given back only after that stream waits for the lane's event.

Without CUDA, host and device are one memory, and everything happens where it is issued.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in a lane's work."""

    def synchronize(self) -> None:
        """Have the host wait for it."""

    def query(self) -> bool:
        """Whether it has happened."""


class _Past:
    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


PAST: Event = _Past()
"""What has happened already."""


def now(device: torch.device) -> Event:
    """The end of what the stream that is current on `device` was given so far."""
    return PAST if device.type != "cuda" else torch.cuda.current_stream(device).record_event()


class Stream:
    """Work in order. `with lane:` issues to it."""

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
        """What is issued from here on comes after `events`."""
        for event in events:
            if self._stream is not None and isinstance(event, torch.cuda.Event):
                self._stream.wait_event(event)

    def mark(self) -> Event:
        """The end of what is issued so far."""
        return PAST if self._stream is None else self._stream.record_event()


class Streams:
    """The streams of one device, what they carried, and what waits to be given back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.h2d, self.update, self.d2h = Stream(device), Stream(device), Stream(device)
        self.moved_bytes: Counter[str] = Counter()
        self._leaving: deque[tuple[Event, Callable[[], None]]] = deque()

    def now(self) -> Event:
        """The end of what the computing stream was given so far."""
        return now(self.device)

    def wait(self, event: Event) -> None:
        """What the computing stream is given from here on comes after `event`."""
        if isinstance(event, torch.cuda.Event):
            torch.cuda.current_stream(self.device).wait_event(event)

    def bring(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy from the host to the device, in the lane that is current."""
        target.copy_(source, non_blocking=True)
        self.moved_bytes["host to device"] += source.numel() * source.element_size()

    def take(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy from the device to the host, in the lane that is current."""
        target.copy_(source, non_blocking=True)
        self.moved_bytes["device to host"] += source.numel() * source.element_size()

    def leave(self, event: Event, free: Callable[[], None], most: int = 2) -> None:
        """Call `free` once the computing stream comes after `event`: when more than `most` have left since."""
        self._leaving.append((event, free))
        self.arrive(most)

    def arrive(self, most: int = 0) -> None:
        """Have the computing stream wait for the oldest departures, until at most `most` are left."""
        while len(self._leaving) > most:
            event, free = self._leaving.popleft()
            self.wait(event)
            free()
