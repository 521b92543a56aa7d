"""The axes of a model in a dry run: one rank of them, in a process group that sends nothing; what tp sends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.model_group import ModelGroup
from shardwise.errors import ConfigError


class DryModelGroup(ModelGroup):
    """The first of `size` ranks, alone: it leaves as it is what it would receive."""

    def share(self, values: torch.Tensor) -> torch.Tensor:
        return values[None] if self.size == 1 else values.new_empty(self.size, *values.shape)

    def share_object(self, value: Any) -> list[Any]:
        return [value] * self.size

    def broadcast(self, tensor: torch.Tensor) -> None:
        pass


@contextlib.contextmanager
def fake_group(size: int, rank: int = 0) -> Iterator[bool]:
    """Within it, this process is one of `size` ranks of a group that sends nothing; not for one rank, then False."""
    if size == 1:
        yield False
        return
    if dist.is_initialized():
        raise ConfigError(
            f"a dry run of a model on {size} ranks needs a process group of its own: run it before "
            "torch.distributed.init_process_group, or in another process"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield True
    finally:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()  # it refers to the group
        dist.destroy_process_group()


def tp_sent_bytes(func: Any, args: Any) -> int:
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
