"""Parameters as DeepSpeed's stage 3 shows them, and those that rest in shards before there is an engine.

A parameter that was built under `zero.Init` rests as one flat shard a rank, and its shape is (0,), as with DeepSpeed.
At `deepspeed.initialize` the engine reads it, one unit at a time. From then on the parameter has its shape, and the
engine gathers and releases it.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import weakref
from collections.abc import Iterable, MutableMapping
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

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
            _open_until_partition(param)

    def all_gather_coalesced(self, params: Iterable[ZeroParameter], **options: Any) -> MultipleAllGatherHandles:
        """The same of several parameters; they are whole when it returns."""
        self.all_gather(params)
        return MultipleAllGatherHandles([])

    def partition(
        self, param_list: Iterable[ZeroParameter] | None = None, has_been_updated: bool = False, **options: Any
    ) -> None:
        """Keep the shard alone again; with `has_been_updated`, of what all ranks have written. A collective."""
        from shardwise.engine.access import gathered

        for param in param_list if param_list is not None else [self]:
            values = param.detach().clone() if has_been_updated and param.early is None else None
            if not close_opened(param):
                close_whole(param, modifier_rank=0 if has_been_updated else None)
            if values is not None:
                with gathered(param, write=True):
                    param.data.copy_(values)

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
        _leave_empty(param, values)
    else:
        param.data = values


def _leave_empty(param: ZeroParameter, early: EarlyShard) -> None:
    param.data = torch.empty(0, dtype=early.dtype, device=early.tensor.device)
    _EMPTY[param.untyped_storage()._cdata] = param


def meant_by(tensor: torch.Tensor) -> torch.Tensor | None:
    """The parameter that a tensor from `state_dict()` stands for; of another tensor, the tensor itself.

    transformers 4.57 passes what `state_dict()` returns to `GatheredParameters`, to fill the parameters that no file
    has. These tensors lack its mark on the others, so it passes them all: for a marked one this is None.
    """
    if isinstance(tensor, nn.Parameter) or tensor.shape != (0,):
        return tensor
    storage = tensor.untyped_storage()._cdata
    param = _EMPTY.get(storage)
    if param is None or param.untyped_storage()._cdata != storage:  # the number of a storage that is no more
        return tensor
    return None if getattr(param, "_is_hf_initialized", False) else param


_EMPTY: MutableMapping[int, ZeroParameter] = weakref.WeakValueDictionary()
"""Parameters that rest in shards without an engine, by the storage that they show meanwhile."""


def hand_over(param: nn.Parameter, device: torch.device) -> None:
    """Have the engine that is about to be built read the values of a parameter that rests in an early shard."""
    from shardwise.unit.master import SHARED_ORIGIN

    assert isinstance(param, ZeroParameter)
    early, param.early = param.early, None
    assert early is not None
    blank = torch.full((), float("nan") if early.dtype.is_floating_point else 0, dtype=early.dtype, device=device)
    param.data = blank.expand(early.shape)
    setattr(param, SHARED_ORIGIN, early.whole)


def _open_until_partition(param: ZeroParameter) -> None:
    """Open the whole values; those of an engine's parameter once, however often it is called."""
    from shardwise.engine.access import gathered

    if param.early is not None:
        open_whole(param)
    elif param not in _OPENED:
        with contextlib.ExitStack() as stack:
            stack.enter_context(gathered(param))
            _OPENED[param] = stack.pop_all()


def close_opened(param: torch.Tensor) -> bool:
    """Close an engine's parameter; whether `all_gather` had opened it."""
    opened = _OPENED.pop(param, None)
    if opened is not None:
        opened.close()
    return opened is not None


_OPENED: MutableMapping[torch.Tensor, contextlib.ExitStack] = WeakTensorKeyDictionary()
"""Parameters of engines that `all_gather` opened."""


class MultipleAllGatherHandles:
    """Several handles as one."""

    def __init__(self, handles: Iterable[Any]) -> None:
        self.handles = list(handles)

    def wait(self, **options: Any) -> None:
        for handle in self.handles:
            handle.wait(**options)


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
        _leave_empty(param, early)
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
