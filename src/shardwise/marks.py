"""Names for the profiler: each phase of each unit shows up in a trace as `shardwise::gather blocks.3`."""

from __future__ import annotations

import contextlib

import torch
from torch.profiler import record_function

_NOTHING = contextlib.nullcontext()


def mark(verb: str, *units: str) -> contextlib.AbstractContextManager[object]:
    """Mark what happens within it, if a profiler is looking: a mark costs microseconds, several times a unit."""
    if torch._C._autograd._profiler_enabled():
        return record_function(f"shardwise::{verb} {' '.join(units)}")
    return _NOTHING
