"""`deepspeed.zero`: parameters that rest in shards before there is an engine, and whole values of any parameter.

A parameter that was built under `Init` rests as one flat shard a rank, and its shape is (0,), as with DeepSpeed. At
`deepspeed.initialize` the engine reads it, one unit at a time. From then on the parameter has its shape, and the engine
gathers and releases it.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from shardwise.compat.comm import init_distributed
from shardwise.compat.early_shard import EarlyShard, early_device

if TYPE_CHECKING:
    from shardwise.unit.unit import Unit

EMPTY_SHAPE = [0]
"""The shape of a parameter that rests in shards without an engine."""


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
        from shardwise.compat.fragments import local_values

        return local_values(self)

    @property
    def ds_persist(self) -> bool:
        return False

    def all_gather(self, param_list: Iterable[ZeroParameter] | None = None, **options: Any) -> None:
        """Open the whole values until `partition`. A collective."""
        for param in param_list if param_list is not None else [self]:
            _open(param)

    def partition(self, param_list: Iterable[ZeroParameter] | None = None, **options: Any) -> None:
        """Keep the shard alone again. A collective."""
        for param in param_list if param_list is not None else [self]:
            _close(param, modifier_rank=None)

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


def is_early(param: torch.Tensor) -> bool:
    return isinstance(param, ZeroParameter) and param.early is not None


class Init:
    """Within it, models are built whole; at its end each rank keeps a shard of every parameter, with rank 0's values.

    The parameters keep the dtype that they are built in: `initialize` casts them, and the master copy is exact. Of
    nested contexts, the outermost one counts; what has an engine by then stays as it is.
    """

    _outermost: ClassVar[Init | None] = None

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        **further: Any,
    ) -> None:
        self._enabled = enabled
        self._built: dict[int, nn.Module] = {}
        self._remove: Callable[[], None] = _nothing
        zero = _zero_section(config_dict_or_path if config_dict_or_path is not None else config)
        offload = zero.get("offload_param")
        self._offloads = remote_device == "cpu" or (
            isinstance(offload, dict) and offload.get("device") in ("cpu", "nvme")
        )
        self._checks_writes = bool(zero.get("enable_sanity_checks"))
        if not enabled:
            return
        init_distributed()
        if module is not None:
            self._shard(module.parameters())

    def __enter__(self) -> Init:
        if self._enabled and Init._outermost is None:
            Init._outermost = self
            self._remove = register_module_parameter_registration_hook(self._note).remove
        return self

    def _note(self, module: nn.Module, name: str, param: Any) -> None:
        if isinstance(param, nn.Parameter):
            self._built[id(module)] = module

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if not self._enabled or Init._outermost is None:
            return
        # What a module has now: `to_empty` replaces parameters without registering them.
        modules = Init._outermost._built.values()
        params = [param for module in modules for param in module.parameters(recurse=False)]
        if Init._outermost is not self:
            for param in params:
                mark(param)
            return
        Init._outermost = None
        self._remove()
        if kind is None:
            self._shard(params)
        self._built = {}

    def _shard(self, params: Iterable[nn.Parameter]) -> None:
        from shardwise.engine.access import unit_of

        device = early_device(self._offloads)
        for param in params:
            if not param.is_meta and unit_of(param) is None:
                shard_early(param, device, self._checks_writes)


def _zero_section(config: Any) -> dict[str, Any]:
    if not isinstance(config, dict):
        return {}
    section = config.get("zero_optimization")
    return section if isinstance(section, dict) else {}


def _nothing() -> None:
    pass


class GatheredParameters:
    """Within it, parameters hold their whole values. What rank `modifier_rank` writes into them is kept on all ranks.

    `params` is a tensor or any iterable of tensors and None, in any order; those that are not sharded are passed over.
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, torch.Tensor) or params is None else list(params)
        # A caller may pass a set, whose order differs between ranks.
        early = {param.ds_id: param for param in given if isinstance(param, ZeroParameter) and is_early(param)}
        self._early = [early[key] for key in sorted(early)] if enabled else []
        self._held = [param for param in given if param is not None and not is_early(param)] if enabled else []
        self._modifier_rank = modifier_rank
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            if self._held:
                from shardwise.engine.access import gathered

                writes = self._modifier_rank is not None
                stack.enter_context(gathered(self._held, write=writes, source=self._modifier_rank))
            for param in self._early:
                stack.enter_context(_opened(param, self._modifier_rank))
            self._stack = stack.pop_all()

    def __exit__(self, *details: Any) -> None:
        self._stack.__exit__(*details)


@contextlib.contextmanager
def _opened(param: ZeroParameter, modifier_rank: int | None) -> Iterator[None]:
    _open(param)
    version = param._version
    try:
        yield
    except BaseException:
        _close(param, modifier_rank=None)  # sends nothing: other ranks may not get here
        raise
    early = param.early
    is_lost = modifier_rank is None and early is not None and early.checks_writes and param._version != version
    _close(param, modifier_rank)
    if is_lost:
        raise RuntimeError(
            "in-place modification of a parameter inside GatheredParameters without a modifier_rank would be lost: "
            "pass modifier_rank=0, and write on that rank"
        )


def _open(param: ZeroParameter) -> None:
    early = param.early
    if early is None:
        return
    if early.users == 0:
        param.data = early.whole().view(early.shape)
    early.users += 1


def _close(param: ZeroParameter, modifier_rank: int | None) -> None:
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


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Does nothing: a parameter that is used outside its own module is gathered at that use."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Does nothing, see `register_external_parameter`."""


class MultipleAllGatherHandles:
    """Several handles as one."""

    def __init__(self, handles: Iterable[Any]) -> None:
        self.handles = list(handles)

    def wait(self, **options: Any) -> None:
        for handle in self.handles:
            handle.wait(**options)
