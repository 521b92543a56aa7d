"""Checks on the CPU that the streams of a GPU are ordered wherever they share memory.

A dry run issues what the engine would issue on a GPU, and its tape notes the streams. This tape follows them with
vector clocks. Two uses of the same bytes, one of them a write, must be ordered by an event or by their stream. Memory
belongs to the stream that allocates it, as torch's allocator has it: other streams use it only after the allocation,
and it is freed only when that stream is ordered after their last use. Host memory is freed, read and written by the
host only when the host has waited for the streams that copy from and to it.

It does not see what a dry run replaces: `ProcessGroupComm`, the disk, and updates on the host.
"""

import contextlib
import traceback
import weakref
from dataclasses import dataclass, field

import torch
from torch.utils._pytree import tree_leaves

from shardwise.timing.tape import Mark, Tape, Uses

HOST = "host"
_aten = torch.ops.aten
_SHAPES_ONLY = {_aten.empty_like.default, _aten.new_empty.default, _aten.zeros_like.default, _aten.new_zeros.default}
"""Operators that do not read the values of their argument."""


class ClockMark(Mark):
    """An event: what a stream had done, and what it was ordered after, when it was recorded."""

    def synchronize(self):
        self._tape.wait(HOST, self.number)

    def query(self):
        self.synchronize()  # it has happened, so what the host issues from now on comes after it
        return True


@dataclass
class Use:
    start: int
    stop: int
    writes: bool
    stream: str
    number: int
    what: str

    def covers(self, other):
        return self.start <= other.start and other.stop <= self.stop


@dataclass
class Memory:
    """One storage: the stream that allocated it, and the uses that later ones must follow."""

    stream: str
    is_host: bool = False
    uses: list[Use] = field(default_factory=list)


class StreamOrder(Tape):
    """A tape that collects the uses that nothing orders, as sentences."""

    def __init__(self):
        super().__init__()
        self.faults = []
        self.streams = set()
        self._clocks = {}
        self._marks = []
        self._memory = {}
        self._paused = 0

    # What a tape is told

    def add(self, func, args, kwargs, result):
        if self._paused:
            return
        reads, writes = [], [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for number, argument in enumerate(func._schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            if is_written or func not in _SHAPES_ONLY:
                (writes if is_written else reads).extend(tensors)
        self._issue(self.stream, func.__name__, reads, writes)

    def send(self, stream, what, size_bytes, ranks, axis, after=None, uses=None):
        stream = f"{stream}, {axis}"
        self.wait(stream, self.mark().number)
        self.wait(stream, after.number if after else None)
        self._issue(stream, what, *(uses or Uses()))
        return self.mark(stream)

    def copy(self, what, size_bytes, uses=None):
        uses = uses or Uses()
        for tensor in uses.reads if what == "up" else uses.writes:
            self._find(tensor).is_host = True
        self._issue(self.stream, f"copy {what}", *uses)

    def mark(self, stream=None):
        self._marks.append(self._now(stream or self.stream))
        return ClockMark(self, len(self._marks) - 1)

    def wait(self, stream, number):
        if number is not None:
            clock = self._clocks.setdefault(stream, {})
            for other, count in self._marks[number].items():
                clock[other] = max(clock.get(other, 0), count)

    def note(self, kernels, issues=1.0):
        pass

    def allocate(self, size_bytes):
        pass

    def close(self, stream):
        return None

    def begin_step(self):
        pass

    @contextlib.contextmanager
    def paused(self):
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @contextlib.contextmanager
    def watching(self):
        """Within it, memory is followed: storages that are resized are freed and allocated."""
        original = torch.UntypedStorage.resize_

        def resize_(storage, size):
            memory = self._memory.get(storage._cdata)
            if memory is not None:
                self._free(memory)
                memory.uses = []
                memory.stream = self.stream
                if size:
                    self._allocate(memory, size)
            return original(storage, size)

        torch.UntypedStorage.resize_ = resize_
        try:
            yield self
        finally:
            torch.UntypedStorage.resize_ = original
            self._memory.clear()  # a dry run ends in the middle of training: what is freed afterwards does not count

    # What it makes of it

    def _now(self, stream):
        """What is over when something runs on a stream now: what it has waited for, and what the host has."""
        clock = dict(self._clocks.get(HOST, {}))
        for other, count in self._clocks.get(stream, {}).items():
            clock[other] = max(clock.get(other, 0), count)
        return clock

    def _issue(self, stream, what, reads, writes):
        # Results of views are not told here, so that what an operator returns is new, or an argument.
        on_host = [tensor for tensor in (*reads, *writes) if self._find(tensor).is_host]
        self._advance(stream)
        self.streams.add(stream)
        if on_host and not what.startswith("copy"):
            self.wait(HOST, self.mark(stream).number)  # an ordinary copy between host and device waits
            self._advance(HOST)
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                memory = self._find(tensor)
                by = HOST if memory.is_host and not what.startswith("copy") else stream
                self._use(memory, tensor, by, what, is_write)

    def _advance(self, stream):
        clock = self._clocks.setdefault(stream, {})
        clock[stream] = clock.get(stream, 0) + 1

    def _use(self, memory, tensor, stream, what, is_write):
        if not tensor.numel():
            return
        size = tensor.element_size()
        first = tensor.storage_offset()
        last = first + sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
        use = Use(first * size, (last + 1) * size, is_write, stream, self._clocks[stream][stream], what)
        now, kept = self._now(stream), []
        for other in memory.uses:
            overlaps = other.start < use.stop and use.start < other.stop
            if overlaps and (is_write or other.writes) and now.get(other.stream, 0) < other.number:
                self._report(
                    f"{what} on {stream} {'writes' if is_write else 'reads'} what {other.what} on "
                    f"{other.stream} {'writes' if other.writes else 'reads'}"
                )
            is_older = use.covers(other) and (is_write or (other.stream == stream and not other.writes))
            if not is_older:
                kept.append(other)
        memory.uses = [*kept, use]

    def _find(self, tensor):
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memory:
            self._memory[key] = Memory(self.stream)
            weakref.finalize(storage, self._forget, key).atexit = False
            self._allocate(self._memory[key], storage.nbytes())
        return self._memory[key]

    def _allocate(self, memory, size):
        """Another tensor of the same stream may have used these addresses until now."""
        number = self._clocks.get(memory.stream, {}).get(memory.stream, 0)
        memory.uses = [Use(0, size, True, memory.stream, number, "an earlier tensor")]

    def _forget(self, key):
        memory = self._memory.pop(key, None)
        if memory is not None:
            self._free(memory)

    def _free(self, memory):
        owner = HOST if memory.is_host else memory.stream
        now = self._now(owner)
        for use in memory.uses:
            if use.stream != owner and now.get(use.stream, 0) < use.number:
                self._report(f"freed for {owner} while {use.what} on {use.stream} uses it")

    def _report(self, text):
        if len(self.faults) > 20:
            return
        frames = [frame for frame in traceback.extract_stack() if "/shardwise/" in frame.filename]
        ways = [f"{frame.filename.rpartition('/shardwise/')[2]}:{frame.lineno}" for frame in frames]
        places = [way for way in ways if not way.startswith(("dry_run", "observe", "timing"))]
        self.faults.append(f"{text} ({' < '.join(places[:-6:-1])})")
