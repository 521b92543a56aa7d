"""Passes of a model in training that only compute: what stays gathered between them, as far as memory allows.

Under `zero3` a forward gathers each unit and releases it. Generating text calls the model once for each token, so that
the whole model would be sent once for each token. Within `Engine.inference`, units stay gathered; those for which the
device has no room are gathered ahead of their use, across the end of a pass (see `schedule.cycle`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from typing import Any

import torch

from shardwise.comm import Comm
from shardwise.errors import ConfigError
from shardwise.machine.memory import host_share_bytes
from shardwise.memory.placement import UnitSize, place
from shardwise.schedule import Schedule
from shardwise.unit import Unit

_SHARE = 0.75
"""The part of the free memory that gathered weights may take: caches and activations need the rest."""


@contextlib.contextmanager
def keeping_gathered(schedule: Schedule, units: Sequence[Unit], comm: Comm, device_bytes: int | None) -> Iterator[None]:
    """Within it, as many units stay gathered as fit `device_bytes`, or three quarters of what is free. A collective."""
    room = min(comm.share_object(_free_bytes(comm.device), "the room for gathered weights"))
    keeps, ahead = choose_kept(units, int(room * _SHARE) if device_bytes is None else device_bytes)
    schedule.inference.begin(keeps, ahead)
    try:
        with torch.no_grad():
            yield
    finally:
        schedule.inference.end()


def generate_together(generate: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> Any:
    """Call a model's `generate` with the option that keeps ranks that are done calling the model until all are done."""
    if world_size > 1 and "synced_gpus" in signature(generate).parameters:
        kwargs = {"synced_gpus": True, **kwargs}
    return generate(*args, **kwargs)


def choose_kept(units: Sequence[Unit], room_bytes: int) -> tuple[list[Unit], int]:
    """The units that stay gathered in `room_bytes`, and how many of the others are gathered ahead."""
    sharded = [unit for unit in units if unit.weights.policy.weights_sharded]
    sizes = [
        UnitSize(unit.name, size := unit.weights.full_bytes, size, max(1, len(unit.spec.runs))) for unit in sharded
    ]
    try:
        found = place(sizes, "host", room_bytes)
    except ConfigError:  # as little as a forward takes
        return [], 0
    return [unit for unit, tier in zip(sharded, found.tiers, strict=True) if tier == "device"], found.ahead


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return host_share_bytes()
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reserved
