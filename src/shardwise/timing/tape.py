"""What a step issues, in its order: kernels, collectives and copies, on streams. Seconds come later.

The fakes of a dry run write it. One tape serves every device and every link: `DeviceTimes.priced` makes operations of
it for one.

CUDA's order is assumed: a stream runs ahead of the host, and what a stream is told to wait for delays only what is
issued to it afterwards. On the CPU the host computes, and waits where the compute stream would.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from shardwise.config.shape import Axis
from shardwise.timing.forms import FRESH, Form, Forms
from shardwise.timing.timeline import COMPUTE


class Issued(NamedTuple):
    """One operation of the tape: kernels by form, or bytes over `ranks` ranks of an axis, or bytes up or down.

    after   the numbers of the entries that it waits for
    issues  how many operators the host issues for it
    """

    stream: str
    what: str
    after: tuple[int, ...]
    kernels: Mapping[Form, float]
    size_bytes: int = 0
    ranks: int = 1
    axis: Axis = "inner"
    issues: float = 0.0


class Uses(NamedTuple):
    """The tensors that a collective or a copy reads and writes. For tapes that check the order of streams."""

    reads: tuple[Any, ...] = ()
    writes: tuple[Any, ...] = ()


_NOTHING = Uses()


class Mark:
    """The end of an entry, or of what the stream holds: an event and a handle at once."""

    def __init__(self, tape: Tape, number: int | None) -> None:
        self._tape = tape
        self.number = number

    def wait(self) -> None:
        """What is issued to the current stream from now on runs after it."""
        self._tape.wait(self._tape.stream, self.number)

    def synchronize(self) -> None:
        self.wait()

    def query(self) -> bool:
        return True


class Tape:
    """Entries, of which the last step begins at `start`."""

    def __init__(self, keeps_calls: bool = False) -> None:
        """With `keeps_calls`, forms have the operators that made them, so that they can be run on a device."""
        self.entries: list[Issued] = []
        self.start = 0
        self.stream = COMPUTE
        self.is_recording = False
        self._forms = Forms(keeps_calls)
        self._open: defaultdict[str, defaultdict[Form, float]] = defaultdict(lambda: defaultdict(float))
        self._issues: defaultdict[str, float] = defaultdict(float)
        self._after: dict[str, set[int]] = {}
        self._last: dict[str, int] = {}
        self.times = 1.0
        """How many equal operations each operation that is issued now represents."""

    def begin_step(self) -> None:
        """The step that counts begins."""
        self.close(COMPUTE)
        self.start = len(self.entries)

    def end(self) -> None:
        """The last step is over."""
        for stream in list(self._open):
            self.close(stream)
        self.is_recording = False

    def add(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operator was issued to the current stream."""
        if not self.is_recording:
            return
        form = self._forms.find(func, args, kwargs, result)
        if form is not None:
            self._open[self.stream][form] += self.times
        self._issues[self.stream] += self.times

    def note(self, kernels: Mapping[Form, float], issues: float = 1.0) -> None:
        """The kernels of `issues` operators are issued to the current stream."""
        self._issues[self.stream] += issues
        for form, count in kernels.items():
            self._open[self.stream][form] += count

    def allocate(self, size_bytes: int) -> None:
        """The engine takes memory that is touched for the first time."""
        if self.is_recording and size_bytes > 0:
            self.note({Form(FRESH, "fp32", 0, size_bytes): 1.0}, 0.0)

    def close(self, stream: str) -> int | None:
        """The number of the last entry of a stream; what it has open becomes one."""
        kernels = self._open.pop(stream, None)
        if kernels is None and not self._issues[stream]:
            return self._last.get(stream)
        what = COMPUTE if stream == COMPUTE else "update"
        return self._append(stream, what, kernels=dict(kernels or {}), issues=self._issues.pop(stream, 0.0))

    def mark(self, stream: str | None = None) -> Mark:
        """The end of all that was issued to a stream so far."""
        return Mark(self, self.close(stream or self.stream) if self.is_recording else None)

    def wait(self, stream: str, number: int | None) -> None:
        """Make what is issued to a stream from now on run after an entry."""
        if number is not None and self.is_recording and number != self._last.get(stream):
            self.close(stream)
            self._after.setdefault(stream, set()).add(number)

    def send(
        self,
        stream: str,
        what: str,
        size_bytes: int,
        ranks: int,
        axis: Axis,
        after: Mark | None = None,
        uses: Uses = _NOTHING,
    ) -> Mark | None:
        """A collective, which starts after what was issued to the current stream, and after another one; None if
        nothing is recorded. The axes of a channel are groups of their own, and so streams of their own."""
        if not self.is_recording:
            return None
        stream = f"{stream}, {axis}"
        self.wait(stream, self.close(self.stream))
        self.wait(stream, after.number if after else None)
        return Mark(self, self._append(stream, what, size_bytes=size_bytes, ranks=ranks, axis=axis))

    def copy(self, what: str, size_bytes: int, uses: Uses = _NOTHING) -> None:
        """A copy between device and host in the current stream."""
        if self.is_recording:
            self.close(self.stream)
            self._append(self.stream, what, size_bytes=size_bytes, issues=1)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Operators within it are not noted."""
        before, self.is_recording = self.is_recording, False
        try:
            yield
        finally:
            self.is_recording = before

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """What is issued within it goes to a stream."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def _append(self, stream: str, what: str, **more: Any) -> int:
        after = tuple(sorted(self._after.pop(stream, ())))
        self.entries.append(Issued(stream, what, after, **({"kernels": {}} | more)))
        self._last[stream] = len(self.entries) - 1
        return self._last[stream]
