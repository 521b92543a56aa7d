"""Memory and wire of a few steps of any system, seen from outside: storages and collectives, never our ledger."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from shardwise.compare.job import Job
from shardwise.compare.systems import System, whole_numel
from shardwise.observe import StorageObserver, WireObserver, WireRecord
from shardwise.observe.labels import Labelling, by_kind

WARM_STEPS = 2
"""The first creates the optimizer's state, and DDP arranges its buckets anew in the second."""
STEPS = 2


WIRE_KINDS = {"gather": ("gather",), "reduce": ("reduce", "all_to_all")}


def observe(job: Job, build: Callable[[], System], train_step: Callable[[System, int], Any]) -> dict[str, Any]:
    """Build a system and train it under both observers; what they saw, as plain data."""
    labelling = Labelling(names=False)
    with (
        StorageObserver(job.device, label=labelling.first_sight) as memory,
        WireObserver(control=is_control) as wire,
    ):
        before = memory.current_bytes
        system = build()
        system.watch_wire()
        _attach(labelling, memory, system)
        for step in range(WARM_STEPS):
            train_step(system, step)
        startup_peak_bytes = memory.peak_bytes - before
        gc.collect()
        memory.reset_peak()
        resting = _note_resting(labelling, memory)
        for step in range(WARM_STEPS, WARM_STEPS + STEPS):
            wire.records.clear()
            train_step(system, step)
        labelling.detach()
        return {
            "peak_bytes": memory.peak_bytes - before,
            "peak_split_bytes": merged(by_kind(memory.breakdown_at_peak)),
            "startup_peak_bytes": startup_peak_bytes,
            "resting_bytes": {kind: resting[kind] for kind in ("weights", "grads", "optim")},
            "wire_bytes_per_step": wire_by_kind(wire),
            "expected_wire_bytes_per_step": system.expected_wire_bytes(),
            "parameters": sum(whole_numel(param) for param in system.model.parameters()),
        }


def is_control(record: WireRecord) -> bool:
    """Partial norms, flags and counters: fp64 or integers, or a single number. Data are 16-bit or fp32 tensors."""
    is_data = record.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return not is_data or record.payload_bytes <= 8 * record.group_size


def wire_by_kind(wire: WireObserver) -> dict[str, int]:
    """Bytes sent: gathers, reductions (an all-reduce is one), and all else, control included.

    A plain send is what its group is called after, and a gather where that says nothing.
    """
    totals: Counter[str] = Counter(gather=0, reduce=0, other=wire.control_sent_bytes)
    for record in wire.data:
        name = (record.group if "reduce" in record.group else "gather") if "send" in record.op else record.op
        kinds = (kind for kind, words in WIRE_KINDS.items() if any(word in name for word in words))
        totals[next(kinds, "other")] += record.sent_bytes
    return {**totals, "total": sum(totals.values())}


def merged(split: dict[str, int]) -> dict[str, int]:
    """The kinds of the placement table, where master copy and moments are `optim`; activations; all else."""
    return {
        **{kind: split[kind] for kind in ("weights", "grads", "activations")},
        "optim": split["master"] + split["moments"],
        "in_flight": split["in flight"] + split["other"],
    }


def _attach(labelling: Labelling, memory: StorageObserver, system: System) -> None:
    labelling.attach(memory, system.model, system.optimizer, master=system.has_master)
    system.on_grads(lambda name, shard: labelling.label(memory, "grads", name, shard))
    for shard in system.shards():
        labelling.label(memory, "weights", "shard", shard)


def _note_resting(labelling: Labelling, memory: StorageObserver) -> dict[str, int]:
    """What is held when the next update begins: all gradients, and neither activations nor buffers."""
    resting: dict[str, int] = {}

    def note() -> None:
        if not resting:  # systems that update piece by piece come here often
            resting.update(merged(by_kind(memory.breakdown)))

    labelling.before_update = note
    return resting
