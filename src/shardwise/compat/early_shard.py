"""What a rank holds of a parameter before the engine does, and where."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise.compat.accelerator import get_accelerator

_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def early_device(is_offloaded: bool) -> torch.device:
    """Where early shards rest: on the host if the weights will, so that a model need not fit on the device.

    With several ranks this needs a process group that also serves the CPU, as that of `init_distributed` does.
    """
    if is_offloaded and (dist.get_world_size() == 1 or "cpu:" in str(dist.get_backend_config())):
        return torch.device("cpu")
    return torch.device(get_accelerator().current_device_name())


class EarlyShard:
    """What a rank holds of a parameter before the engine does: a flat shard, all of the same length.

    `users` counts the contexts that have the whole values open.
    """

    def __init__(self, values: torch.Tensor, device: torch.device, checks_writes: bool = False) -> None:
        self.shape, self.dtype = values.shape, values.dtype
        self.users = 0
        self.checks_writes = checks_writes
        self._numel = values.numel()
        self.tensor = self._cut(values.detach().to(device), source=0)

    def whole(self) -> torch.Tensor:
        """All flat elements. A collective."""
        if self.world_size == 1:
            return self.tensor[: self._numel]
        full = self.tensor.new_empty(self.world_size * self.tensor.numel())
        _ALL_GATHER(full, self.tensor)
        return full[: self._numel]

    def take_back(self, values: torch.Tensor, source: int) -> None:
        """Cut the shard from what rank `source` has written. A collective."""
        self.tensor = self._cut(values.detach(), source)  # a new tensor: copies of the parameter share the old one

    def _cut(self, values: torch.Tensor, source: int) -> torch.Tensor:
        values = values.contiguous()
        if self.world_size > 1:
            dist.broadcast(values, source)
        each = -(-self._numel // self.world_size)
        shard = values.new_zeros(each)
        part = values.reshape(-1)[each * dist.get_rank() : each * (dist.get_rank() + 1)]
        shard[: part.numel()] = part
        return shard

    @property
    def world_size(self) -> int:
        return dist.get_world_size()
