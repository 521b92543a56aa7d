"""Measure what kernels, copies and collectives take on this machine.

Kernels are run again in the forms in which a step calls them: on the CPU by all ranks of the step at once, which share
its cores and its memory; on CUDA one after the other behind a delay, so that the device never waits for the host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.tensors import tensors_in
from shardwise.timing.forms import Form
from shardwise.timing.tape import Tape

_COLD_BYTES = 96 << 20
"""Arguments take turns, so that they come from memory and not from a cache, as in training."""
_LEAST_S, _REPEATS, _MOST_COPIES = 0.02, 5, 8
_CALLS = 20
_FRESH_BYTES = 16 << 20
SIDES = (256, 1024, 2048, 4096, 8192)
SIZES = tuple(1 << power for power in range(12, 30, 3))


def measure_forms(forms: Iterable[Form], device: torch.device) -> dict[str, float]:
    """Seconds of each form that has a call, by key."""
    return {form.key: kernel_s(form, device) for form in forms if form.call is not None}


def kernel_s(form: Form, device: torch.device) -> float:
    """Seconds of one call with arguments of this form."""
    func, args, kwargs = form.call
    size = sum(tensor.nbytes for tensor in tensors_in(args, kwargs))
    count = max(1, min(_MOST_COPIES, _COLD_BYTES // max(1, size)))
    copies = [(_real(args, device), _real(kwargs, device)) for _ in range(count)]
    number = 0
    made: list[Any] = []

    def call() -> None:
        nonlocal number
        own, named = copies[number % count]
        number += 1
        # Results live for a while and are freed together, as in training: what is freed at once is allocated again
        # without the page faults that take longer than many kernels.
        if len(made) == _MOST_COPIES:
            made.clear()
        made.append(func(*own, **named))

    with torch.no_grad():
        return call_s(call, device)


def call_s(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call."""
    return _device_s(call) if device.type == "cuda" else _host_s(call)


def _host_s(call: Callable[[], object]) -> float:
    """The median of several runs: a step has many kernels, of which few take the least time that they can."""
    once = _seconds(call)
    times = max(_MOST_COPIES, min(200, int(_LEAST_S / _REPEATS / max(once, 1e-7))))
    runs = _REPEATS if once < _LEAST_S / _REPEATS else 2
    return statistics.median(_seconds(call, times) for _ in range(runs))


def _seconds(call: Callable[[], object], times: int = 1) -> float:
    """The mean seconds of a call, over `times` calls."""
    started = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - started) / times


def _device_s(call: Callable[[], object]) -> float:
    """A delay lets the host issue all calls before the first one runs."""
    call()
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    for _ in range(_CALLS):
        call()
    events[1].record()
    torch.cuda.synchronize()
    return float(events[0].elapsed_time(events[1])) / 1e3 / _CALLS


def _real(value: Any, device: torch.device) -> Any:
    """The same with tensors that have values: small ones, so that indices are valid."""
    if isinstance(value, torch.Tensor):
        room = 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
        made = torch.zeros(room if value.numel() else 0, dtype=value.dtype, device=device)
        if made.is_floating_point():
            made.fill_(0.01)
        return made.as_strided(value.shape, value.stride())  # an expanded tensor is one here too
    if isinstance(value, (list, tuple)):
        return type(value)(_real(each, device) for each in value)
    if isinstance(value, Mapping):
        return {key: _real(each, device) for key, each in value.items()}
    return device if isinstance(value, torch.device) else value


class _Recorded(TorchDispatchMode):
    """Notes the operators of a real run."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self._tape.add(func, args, kwargs or {}, result)
        return result


def measure_issue_s(step: Callable[[], object], device: torch.device) -> float:
    """What an operator takes the host in addition to its kernel, from a step of very short kernels."""
    step()
    tape = Tape(keeps_calls=True)
    tape.is_recording = True
    with _Recorded(tape):
        step()
    tape.end()
    kernels, issues = tape.entries[-1].kernels, tape.entries[-1].issues
    seconds = min(_seconds(step) for _ in range(_CALLS))
    if device.type == "cuda":
        return seconds / issues  # the kernels are shorter than that, so the host is what a step waits for
    known = measure_forms(kernels, device)
    return max(0.0, seconds - sum(count * known[form.key] for form, count in kernels.items())) / issues


def measure_fresh(device: torch.device) -> float:
    """Bytes a second of memory that is touched for the first time, without what touching it takes at any time."""
    there = torch.zeros(_FRESH_BYTES // 4, device=device)
    made: list[torch.Tensor] = []

    def touch() -> None:
        if len(made) == _MOST_COPIES:
            made.clear()
        made.append(torch.empty_like(there).fill_(1.0))

    more = _host_s(touch) - _host_s(lambda: there.fill_(1.0))
    return _FRESH_BYTES / max(more, 1e-9)


def grid(dtypes: Sequence[torch.dtype], sides: Sequence[int] = SIDES, sizes: Sequence[int] = SIZES) -> list[Form]:
    """Matrix products and attention over shapes and dtypes, and element-wise kernels over sizes, as forms to run."""
    tape = Tape(keeps_calls=True)
    tape.is_recording = True
    with torch.device("meta"), torch.no_grad(), _Recorded(tape):
        for dtype in dtypes:
            for rows, columns, depth in _shapes(sides):
                torch.mm(torch.empty(rows, depth, dtype=dtype), torch.empty(depth, columns, dtype=dtype))
        for size in sizes:
            _ = torch.empty(size // 8) + 1.0
    tape.end()
    return list(tape.entries[-1].kernels)


def _shapes(sides: Sequence[int]) -> list[tuple[int, int, int]]:
    """Squares, and few rows on large matrices, as in training on few tokens."""
    squares = [(side, side, side) for side in sides]
    return squares + [(rows, side, side) for side in sides[1:] for rows in sides[:2] if rows < side]
