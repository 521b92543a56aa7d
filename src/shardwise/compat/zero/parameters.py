"""Parameters as DeepSpeed's stage 3 shows them, and those that rest in shards before there is an engine.

A parameter that was built under `zero.Init` rests as one flat shard a rank, and its shape is (0,), as with DeepSpeed.
At `deepspeed.initialize` the engine reads it, one unit at a time. From then on the parameter has its shape, and the
engine gathers and releases it.
"""

from __future__ import annotations

import copy
import enum
import weakref
from collections.abc import Iterable
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.compat.standalone.accelerator import get_accelerator

if TYPE_CHECKING:
    from shardwise.unit.unit import Unit

partitioned_param_data_shape = [0]
"""The shape of a parameter that rests in shards without an engine."""
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


class ZeroParamStatus(enum.Enum):
    """Whether a parameter has its whole values here."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(enum.Enum):
    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParameter(nn.Parameter):
    """A parameter with the attributes by which clients recognise stage 3."""

    early: EarlyShard | None = None
    ds_id: int
    ds_active_sub_modules: set[int]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A parameter of its own: whole where the values are open, else one that rests in shards as well."""
        if id(self) not in memo:
            copied = nn.Parameter(self.detach().clone(), self.requires_grad)
            if self.early is not None and self.early.users == 0:
                mark(copied)
                put_back(copied, copy.copy(self.early))
            memo[id(self)] = copied
        made: nn.Parameter = memo[id(self)]
        return made

    @property
    def ds_shape(self) -> torch.Size:
        return self.early.shape if self.early is not None else self.shape

    @property
    def ds_numel(self) -> int:
        return self.ds_shape.numel()

    @property
    def ds_status(self) -> ZeroParamStatus:
        from shardwise.engine.access import unit_of

        if self.early is None:
            return _status(unit_of(self))
        return ZeroParamStatus.AVAILABLE if self.early.users else ZeroParamStatus.NOT_AVAILABLE

    @property
    def ds_tensor(self) -> torch.Tensor:
        """This rank's elements, flat; of an engine's parameter, a copy in the precision that is updated."""
        if self.early is not None:
            return self.early.tensor
        from shardwise.compat.zero.fragments import local_values

        return local_values(self)

    @property
    def ds_persist(self) -> bool:
        return False

    def all_gather(self, param_list: Iterable[ZeroParameter] | None = None, **options: Any) -> None:
        """Open the whole values until `partition`. A collective."""
        for param in param_list if param_list is not None else [self]:
            open_whole(param)

    def partition(self, param_list: Iterable[ZeroParameter] | None = None, **options: Any) -> None:
        """Keep the shard alone again. A collective."""
        for param in param_list if param_list is not None else [self]:
            close_whole(param, modifier_rank=None)

    def partition_numel(self) -> int:
        return self.ds_tensor.numel()


_IDS = count()


def mark(param: nn.Parameter) -> None:
    """Give a parameter the attributes of stage 3."""
    if not isinstance(param, ZeroParameter):
        param.__class__ = ZeroParameter
        param.ds_id = next(_IDS)  # type: ignore[attr-defined]  # now a ZeroParameter
        param.ds_active_sub_modules = set()  # type: ignore[attr-defined]  # read by TRL


def shard_early(param: nn.Parameter, device: torch.device, checks_writes: bool = False) -> None:
    """Leave this rank's shard of a parameter alone, with rank 0's values. A collective."""
    mark(param)
    assert isinstance(param, ZeroParameter)
    if param.early is None:
        put_back(param, EarlyShard(param, device, checks_writes))


def put_back(param: torch.Tensor, values: torch.Tensor | EarlyShard) -> None:
    """Give a parameter values outside any engine: whole, or this rank's shard."""
    if isinstance(values, EarlyShard):
        assert isinstance(param, ZeroParameter)
        param.early = values
        param.data = torch.empty(0, dtype=values.dtype, device=values.tensor.device)
    else:
        param.data = values


def hand_over(param: nn.Parameter, device: torch.device) -> None:
    """Have the engine that is about to be built read the values of a parameter that rests in an early shard."""
    from shardwise.unit.origins import SHARED_ORIGIN

    assert isinstance(param, ZeroParameter)
    early, param.early = param.early, None
    assert early is not None
    blank = torch.full((), float("nan") if early.dtype.is_floating_point else 0, dtype=early.dtype, device=device)
    param.data = blank.expand(early.shape)
    setattr(param, SHARED_ORIGIN, early.whole)


def is_zero_param(param: torch.Tensor) -> bool:
    """Whether a parameter has the attributes of stage 3."""
    return isinstance(param, ZeroParameter)


def is_early(param: torch.Tensor) -> bool:
    return isinstance(param, ZeroParameter) and param.early is not None


def open_whole(param: ZeroParameter) -> None:
    early = param.early
    if early is None:
        return
    if early.users == 0:
        param.data = early.whole().view(early.shape)
    early.users += 1


def close_whole(param: ZeroParameter, modifier_rank: int | None) -> None:
    early = param.early
    if early is None:
        return  # an engine has it now
    if modifier_rank is not None:
        early.take_back(param, modifier_rank)
    early.users -= 1
    if early.users == 0:
        param.data = torch.empty(0, dtype=early.dtype, device=early.tensor.device)
    elif modifier_rank is not None:
        param.data = early.whole().view(early.shape)


def mark_module(model: nn.Module) -> None:
    """Give a model and its parameters what clients look for under stage 3."""
    for param in model.parameters():
        mark(param)
    nn.Module.ds_external_parameters = _no_external_parameters  # type: ignore[attr-defined]  # as DeepSpeed does
    torch.Tensor.ds_status = property(_status_of_saved)  # type: ignore[attr-defined]  # read by TRL


def note_units(units: Iterable[Unit]) -> None:
    """Remember an engine's units, by whose buffers tensors are recognised."""
    _UNITS.update(units)


_UNITS: weakref.WeakSet[Unit] = weakref.WeakSet()


def _status(unit: Unit | None) -> ZeroParamStatus:
    from shardwise.unit.weights import WeightsState

    is_here = unit is None or unit.weights.state is WeightsState.GATHERED
    return ZeroParamStatus.AVAILABLE if is_here else ZeroParamStatus.NOT_AVAILABLE


def _status_of_saved(tensor: torch.Tensor) -> ZeroParamStatus:
    """Of a tensor that autograd saved for a parameter: under hooks on saved tensors it is not the parameter itself.

    TRL's chunked losses ask it in their backward.
    """
    known = [] if isinstance(tensor, nn.Parameter) else list(_UNITS)
    unit = next((unit for unit in known if unit.weights.storage_id == tensor.untyped_storage()._cdata), None)
    if unit is None:
        raise AttributeError("'Tensor' object has no attribute 'ds_status'")
    return _status(unit)


def _no_external_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """A parameter that is used outside its own module is gathered at that use: none has to be registered."""
    return []
