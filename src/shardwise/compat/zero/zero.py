"""`deepspeed.zero`: models that are built in shards, and whole values of any parameter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from shardwise.compat.standalone.comm import init_distributed
from shardwise.compat.standalone.settings import read_settings
from shardwise.compat.zero.parameters import (
    ZeroParameter,
    close_whole,
    early_device,
    is_early,
    mark,
    meant_by,
    open_whole,
    shard_early,
)
from shardwise.errors import CompatibilityError

ZeRORuntimeException = CompatibilityError
_LEAF = "_z3_leaf"


class Init:
    """Within it, models are built whole; at its end each rank keeps a shard of every parameter, with rank 0's values.

    Without `dtype` the parameters keep the one that they are built in: `initialize` casts them, and the master copy is
    exact. Of nested contexts, the outermost one counts; what has an engine by then stays as it is.
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
        if enabled:
            _refuse_options(data_parallel_group, further)
        self._enabled = enabled
        self._dtype = dtype
        self._built: dict[int, nn.Module] = {}
        self._remove: Callable[[], None] = _nothing
        given = config_dict_or_path if config_dict_or_path is not None else config
        zero = _zero_section(given) if enabled else {}
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
                if self._dtype is not None and param.is_floating_point() and not is_early(param):
                    param.data = param.data.to(self._dtype)
                shard_early(param, device, self._checks_writes)


def _refuse_options(group: Any, options: dict[str, Any]) -> None:
    if group is not None and torch.distributed.get_world_size(group) != torch.distributed.get_world_size():
        raise CompatibilityError("zero.Init(data_parallel_group=...) names some of the ranks: leave it out")
    for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_param_parallel_group"):
        if options.get(name):
            raise CompatibilityError(f"zero.Init({name}=...) is not served by shardwise: leave it out")


def _zero_section(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    section = read_settings(config).get("zero_optimization")
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
        listed = [params] if isinstance(params, torch.Tensor) else () if params is None else params
        given = [meant_by(tensor) for tensor in listed if tensor is not None]
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
    open_whole(param)
    version = param._version
    try:
        yield
    except BaseException:
        close_whole(param, modifier_rank=None)  # sends nothing: other ranks may not get here
        raise
    early = param.early
    is_lost = modifier_rank is None and early is not None and early.checks_writes and param._version != version
    close_whole(param, modifier_rank)
    if is_lost:
        raise RuntimeError(
            "in-place modification of a parameter inside GatheredParameters without a modifier_rank would be lost: "
            "pass modifier_rank=0, and write on that rank"
        )


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Does nothing: a parameter that is used outside its own module is gathered at that use."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Does nothing, see `register_external_parameter`."""


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[Any], raise_if_not_found: bool = True, **options: Any
) -> list[nn.Module]:
    """Mark the modules of these classes, and return them. It changes nothing: whole blocks are gathered as one unit."""
    return _marked(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[Any], raise_if_not_found: bool = True, **options: Any
) -> list[nn.Module]:
    """Remove the mark."""
    return _marked(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their full names; returns them, and the names that the model does not have."""
    return _marked_by(model, module_names, raise_if_not_found, lambda name, wanted: name == wanted)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by the ends of their full names; returns them, and the ends that no module has."""
    return _marked_by(model, module_name_suffixes, raise_if_not_found, str.endswith)


def set_z3_leaf_module(module: nn.Module, flag: bool) -> None:
    vars(module)[_LEAF] = flag


def z3_leaf_module(module: nn.Module) -> bool:
    return bool(vars(module).get(_LEAF, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if z3_leaf_module(module)]


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """The model inside an engine, with whole parameters under stage 3. A collective."""
    inner = getattr(model, "module", model)
    offload = getattr(getattr(model, "optimizer", None), "parameter_offload", None)
    hidden = offload.without_hooks() if offload is not None else contextlib.nullcontext()
    with hidden, GatheredParameters(inner.parameters()):
        yield inner


def _marked(model: nn.Module, classes: Iterable[Any], flag: bool, raises: bool) -> list[nn.Module]:
    """Marks modules by their class, its name, or its full name."""
    wanted = list(classes)
    found = [module for module in model.modules() if any(_is_of(module, kind) for kind in wanted)]
    if raises and not found:
        raise ValueError(f"No modules of type {wanted} found in model {type(model).__name__}: name classes that it has")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _marked_by(
    model: nn.Module, names: Iterable[str], raises: bool, fits: Callable[[str, str], bool]
) -> tuple[list[nn.Module], list[str]]:
    own, wanted = dict(model.named_modules()), list(names)
    found = [module for name, module in own.items() if any(fits(name, each) for each in wanted)]
    missing = [each for each in wanted if not any(fits(name, each) for name in own)]
    if raises and missing:
        raise ValueError(f"no module of {type(model).__name__} is named {missing}: see model.named_modules()")
    for module in found:
        set_z3_leaf_module(module, True)
    return found, missing


def _is_of(module: nn.Module, kind: Any) -> bool:
    if isinstance(kind, str):
        own = type(module)
        return kind in (own.__name__, own.__qualname__, f"{own.__module__}.{own.__qualname__}")
    return isinstance(module, kind)
