"""`shardwise.stream`: from a model or a folder, and budgets, to a model whose weights are streamed."""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from shardwise.checks import check_range
from shardwise.comm import Comm, ProcessGroupComm
from shardwise.comm.model_group import ModelGroup
from shardwise.config.sections import KindPlacement, MeshSection, Placement, Precision, Tier
from shardwise.config.shape import NodeShape
from shardwise.deferred.deferred import (
    DeferredSession,
    check_deferred,
    device_for,
    fill_buffers,
    finish,
    prepare,
    session_behind,
)
from shardwise.engine.access import is_managed
from shardwise.engine.initialize import join_ranks, let_segments_grow
from shardwise.errors import ConfigError
from shardwise.inference.opening import open_folder
from shardwise.inference.quantized import QUANTIZED, quantize
from shardwise.inference.streamed_model import StreamedModel, WeightStream
from shardwise.inference.working_memory import dimensions_in, working_memory
from shardwise.machine.memory import host_bytes, host_share_bytes
from shardwise.machine.process import end_with_launcher
from shardwise.memory.placement import UnitSize, WeightPlacement, place
from shardwise.partition import Span
from shardwise.partition.dtensors import is_dtensor
from shardwise.partition.policy import DTYPES, Policy, is_storage
from shardwise.partition.stored import stored_tensors
from shardwise.partition.units import divide
from shardwise.sizes import format_bytes, parse_bytes
from shardwise.unit.master import ORIGIN
from shardwise.unit.plan import UnitPlan, layout_for

Weights = Literal["auto", "host", "disk"]
CacheTier = Literal["device", "host"]
_HOST_SHARE = 0.9
"""The part of the host's free memory that weights may take."""
_SMALL_SHARE = 64
"""A unit smaller than this part of the largest stays on the device."""
_DEVICE_SHARE = 0.95
"""The part of the device's free memory that is used: segments are not filled to the last byte."""


def stream(
    model: nn.Module | str | os.PathLike[str],
    weights: Weights = "auto",
    *,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    precision: str | None = None,
    kv: CacheTier = "device",
    batch: int = 1,
    context: int = 1024,
    device: Any = None,
    mesh: Any = None,
) -> StreamedModel:
    """Make a model compute with weights that do not fit the device, and return it: `model(...)` and
    `model.generate(...)` work as before, without gradients. It keeps its class, and has a `shardwise_stream`.

    `model` is a module, or a Hugging Face folder (`config.json` and safetensors files), of which only the
    configuration is read at once. Weights rest on the `host` (in pinned memory), or on the `disk`, in the folder's own
    files; `auto` takes the host if it has room. As many units as `device_memory` has room for rest on the device, by
    default all that fit; with `disk`, as many others as `host_memory` has room for are cached on the host. Budgets are
    bytes or texts such as "22GiB". `kv` is where `generate` keeps the keys and values of past tokens. Memory is set
    aside for `batch` sequences of `context` tokens, in models whose configuration tells their dimensions.

    With several ranks, each reads its part of every unit and gathers the rest from the others: all ranks call the model
    equally often. `model.shardwise_stream.close()` frees everything, and so does the end of the process; its `report()`
    says what was fetched.

    >>> import torch, shardwise
    >>> layers = [torch.nn.Linear(64, 64) for _ in range(8)]
    >>> model = shardwise.stream(torch.nn.Sequential(*layers), "host", device_memory="80KiB", device="cpu")
    >>> model(torch.ones(1, 64)).shape
    torch.Size([1, 64])
    >>> model.shardwise_stream.report().resident_units
    1
    >>> model.shardwise_stream.close()
    """
    end_with_launcher()
    if not isinstance(model, (nn.Module, str, os.PathLike)):
        raise ConfigError(
            f"the model is a {type(model).__name__}: give a module, or the folder of a Hugging Face model"
        )
    check_arguments(weights, precision, kv, batch, context)
    budgets = parse_budget("device_memory", device_memory), parse_budget("host_memory", host_memory)
    device = _device(model, device)
    ranks = join_ranks(mesh, device, MeshSection())
    if device.type == "cuda":
        torch.cuda.set_device(device)
        let_segments_grow()
    comm = ProcessGroupComm(ranks.group, device, () if ranks.is_world else ranks.members)
    request = StreamRequest(weights, *budgets, precision if precision not in QUANTIZED else None)
    try:
        opened = _open_together(model, weights, precision, kv, comm)
        itemsize = _itemsize(opened, request.precision)
        of = dimensions_in(getattr(opened, "config", None))
        working_bytes = working_memory(of, batch, context, itemsize, kv == "device").total_bytes if of else 0
        return _start(opened, request, working_bytes, comm)
    except BaseException:
        comm.begin_close()
        comm.close()
        raise


@dataclass(frozen=True)
class StreamRequest:
    """What the caller asked for: where weights rest, budgets in bytes, and the dtype to compute in."""

    weights: Weights
    device_bytes: int | None
    host_bytes: int | None
    precision: str | None


def _open_together(model: Any, weights: Weights, precision: str | None, kv: CacheTier, comm: Comm) -> nn.Module:
    """The model to stream. If a rank cannot open it, all ranks raise."""
    failure: Exception | None = None
    try:
        if isinstance(model, nn.Module):
            check_model(model)
        else:
            model = open_folder(Path(model), comm.device, precision, may_load=weights != "disk")
        if precision in QUANTIZED:
            quantize(model, precision)
        if kv == "host":
            _rest_cache_on_host(model, comm.device)
    except Exception as error:
        failure = error
    comm.everyone.fail_together(failure, "the model to stream")
    opened: nn.Module = model
    return opened


def parse_budget(name: str, value: int | str | None) -> int | None:
    """The bytes of a budget; a ConfigError names it if it is none."""
    try:
        return parse_bytes(value) if value is not None else None
    except ValueError as error:
        raise ConfigError(f"{name} is {value!r}: {error}") from None


def unit_sizes(plans: Sequence[UnitPlan]) -> list[UnitSize]:
    """What `place` needs to know about the units. Small ones, as norms in a dtype of their own, stay on the device:
    their copies would cost more than they save."""
    largest = max((plan.full_bytes for plan in plans), default=0)
    return [
        UnitSize(
            name=plan.name,
            full_bytes=plan.full_bytes,
            shard_bytes=plan.layout.shard_numel * plan.policy.weight_dtype.itemsize,
            uses=max(1, len(runs := plan.spec.runs)),
            stays=not runs or ("",) in runs or plan.full_bytes * _SMALL_SHARE < largest,
        )
        for plan in plans
    ]


def plan_units(model: nn.Module, precision: str | None, world_size: int) -> list[UnitPlan]:
    """The units of a model that is not trained, before it is decided where they rest."""
    params = stored_tensors(model)
    plans = []
    for spec in divide(model):
        keeps_dtype = is_storage(spec.dtype, trainable=False, inner=spec.inner)
        dtype = spec.dtype if precision is None or keeps_dtype else DTYPES[precision]
        policy = _policy(dtype, "host")
        layout = layout_for(spec, params, {}, policy, world_size, ModelGroup())
        plans.append(UnitPlan(spec, layout, policy, NodeShape(1, world_size)))
    return plans


def placed(plan: UnitPlan, tier: Tier) -> UnitPlan:
    """The same unit, resting on `tier`."""
    return dataclasses.replace(plan, policy=_policy(plan.policy.weight_dtype, tier))


def _start(model: nn.Module, request: StreamRequest, working_bytes: int, comm: Comm) -> StreamedModel:
    session = session_behind(model)
    trainable = [name for name, param in model.named_parameters() if param.requires_grad]
    try:
        model.requires_grad_(False)  # units of what is not trained
        plans = plan_units(model, request.precision, comm.world_size)
        placement = _placement(model, plans, request, working_bytes, session, comm)
    except ConfigError:
        _require_grad(model, trainable)  # a model that is refused is as it was
        raise
    plans = [placed(plan, tier) for plan, tier in zip(plans, placement.tiers, strict=True)]
    _give_origins(model, session, comm)
    precision = Precision.model_validate({"compute": request.precision or "model"})
    files = session.weights.files if session is not None and session.weights is not None else []
    uses_files = "disk" in placement.tiers
    set_aside = working_bytes + _buffer_bytes(model)
    WeightStream(model, plans, placement, precision, comm, files if uses_files else (), set_aside)
    finish()
    # torch chooses kernels by this flag under no_grad too: without it, some bits would not be those of the model.
    _require_grad(model, trainable)
    if comm.device.type == "cuda":
        torch.cuda.empty_cache()  # what the model as it was built lay in
    return cast(StreamedModel, model)


def _require_grad(model: nn.Module, names: Sequence[str]) -> None:
    for name in names:
        model.get_parameter(name).requires_grad_(True)


def _placement(
    model: nn.Module,
    plans: Sequence[UnitPlan],
    request: StreamRequest,
    working_bytes: int,
    session: DeferredSession | None,
    comm: Comm,
) -> WeightPlacement:
    """Where the units rest. The same on all ranks: the smallest room counts."""
    gc.collect()  # models that were dropped lie in reference cycles, and their memory is free after that
    sizes = unit_sizes(plans)
    rooms = comm.share_object((_device_room(comm.device), _host_room(model, comm)), "the room for weights")
    device_room, host_room = (min(room) for room in zip(*rooms, strict=True))
    device_bytes = device_room if request.device_bytes is None else min(request.device_bytes, device_room)
    device_bytes -= working_bytes + _buffer_bytes(model)
    host_bytes = host_room if request.host_bytes is None else min(request.host_bytes, host_room)
    has_files = session is not None and session.weights is not None
    if request.weights != "disk":
        found = place(sizes, "host", device_bytes)
        if found.bytes_on("host") <= host_bytes:
            return found
        if request.weights == "host" or not has_files:
            raise ConfigError(
                f"the weights that do not rest on the device take {format_bytes(found.bytes_on('host'))} of host "
                f"memory on each rank, and {format_bytes(host_bytes)} may be used: stream a Hugging Face folder with "
                "weights='disk', raise device_memory or host_memory, or start more ranks on other hosts"
            )
    if not has_files:
        raise ConfigError(
            "weights='disk' reads the files of a Hugging Face folder, and a module has none: pass the folder, or save "
            "the model first with model.save_pretrained(folder)"
        )
    return place(sizes, "disk", device_bytes, request.host_bytes if request.weights == "disk" else host_bytes)


def _give_origins(model: nn.Module, session: DeferredSession | None, comm: Comm) -> None:
    """Have units read their values from files, or from the model itself, whose own memory they free one by one."""
    if session is not None:
        prepare(model, session, comm)
        return
    if comm.world_size == 1:  # else rank 0's values are sent to all
        for tensor in stored_tensors(model).values():
            setattr(tensor, ORIGIN, partial(_part, tensor.data.reshape(-1)))
    fill_buffers(model, {}, comm.device)


def _rest_cache_on_host(model: nn.Module, device: torch.device) -> None:
    """Have `generate` use transformers' own cache for it. On the CPU, device and host are one."""
    settings: Any = getattr(model, "generation_config", None)
    if settings is None:
        raise ConfigError("kv='host' is for models of transformers, which have a generation_config: leave it out")
    if device.type == "cuda":
        settings.cache_implementation = "offloaded"
        model.register_forward_pre_hook(_order_prefetches, with_kwargs=True)


def _order_prefetches(model: nn.Module, args: Any, kwargs: Any) -> None:
    """Let a cache's prefetches wait for what the current stream has been given before them.

    transformers copies keys and values to the host on the current stream, back on a stream of its own, and does not
    order the two: it relies on a host that is not far ahead of the device. Here the device waits for weights while the
    host goes on, so a prefetch would read what has not been written yet, or write into memory that is still read
    (tests/test_stream_gpu.py, test_keys_and_values_on_the_host_give_the_same_tokens).
    """
    cache = kwargs.get("past_key_values")
    own = [getattr(cache, f"{kind}_attention_cache", None) for kind in ("self", "cross")]  # of encoder-decoder models
    for part in filter(None, (cache, *own)):
        stream = getattr(part, "prefetch_stream", None)
        if stream is not None and "prefetch" not in vars(part):
            part.prefetch = partial(_prefetch_in_order, part.prefetch, stream)


def _prefetch_in_order(prefetch: Callable[..., None], stream: Any, *args: Any, **kwargs: Any) -> None:
    stream.wait_stream(torch.cuda.current_stream())
    prefetch(*args, **kwargs)


def _part(flat: torch.Tensor, part: Span) -> torch.Tensor:
    return flat[part.slice]


def _policy(dtype: torch.dtype, tier: Tier) -> Policy:
    """The policy of a unit that is not trained: whole on the device, or sharded and elsewhere."""
    own = KindPlacement(sharding="replicated" if tier == "device" else "sharded", tier=tier)
    placement = Placement(weights=own, grads=KindPlacement(sharding=own.sharding), optim=own)  # there are no gradients
    return Policy(False, placement, *[dtype] * 6)


def _buffer_bytes(model: nn.Module) -> int:
    return sum(buffer.nbytes for buffer in model.buffers())


def _itemsize(model: nn.Module, precision: str | None) -> int:
    if precision is not None:
        return DTYPES[precision].itemsize
    return max((param.dtype.itemsize for param in model.parameters()), default=4)


def _device_room(device: torch.device) -> int:
    if device.type != "cuda":
        return int(host_bytes("MemAvailable") * _HOST_SHARE)
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return int((free - torch.cuda.memory_allocated(device)) * _DEVICE_SHARE)


def _host_room(model: nn.Module, comm: Comm) -> int:
    """This rank's share of what is free on its host, with what the model itself will give back."""
    own = sum(tensor.nbytes for tensor in stored_tensors(model).values() if tensor.device.type == "cpu")
    return int(host_share_bytes() * _HOST_SHARE) + own


def _device(model: Any, given: Any) -> torch.device:
    """The device that was given; else the one that a model is on, unless that is the CPU and there is a GPU."""
    if given is None and isinstance(model, nn.Module):
        session = session_behind(model)
        if session is not None:
            return session.device
        on = next((param.device for param in model.parameters() if param.device.type == "cuda"), None)
        return on or device_for(None)
    try:
        found = device_for(given)
    except (RuntimeError, TypeError):
        raise ConfigError(f"device is {given!r}: take cpu, cuda or cuda:N") from None
    if found.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {given!r}, on which nothing can be computed here: take cpu, cuda or cuda:N")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {given!r}, and torch sees {torch.cuda.device_count()} GPUs: take another, or cpu")
    return torch.device("cuda", torch.cuda.current_device()) if found == torch.device("cuda") else found


def check_model(model: nn.Module) -> None:
    """Raise a ConfigError for a model that has no values, or that is under an engine or streamed already."""
    managed = [name for name, tensor in stored_tensors(model).items() if is_managed(tensor)]
    if managed:
        raise ConfigError(
            f"parameter {managed[0]!r} is under an engine or a stream already: call engine.destroy(), or "
            "model.shardwise_stream.close(), on that one first; an engine in training generates with engine.generate()"
        )
    for name, param in model.named_parameters():
        if is_dtensor(param):
            raise ConfigError(
                f"parameter {name!r} is a DTensor, and a stream gathers whole units from all ranks: stream the model "
                "before it is parallelized"
            )
    check_deferred(model)


def check_arguments(weights: str, precision: str | None, kv: str, batch: int, context: int) -> None:
    """Raise a ConfigError for a value that an argument cannot have."""
    if kv not in get_args(CacheTier):
        raise ConfigError(f"kv is {kv!r}: take one of {', '.join(get_args(CacheTier))}")
    if weights not in get_args(Weights):
        raise ConfigError(f"weights is {weights!r}: take one of {', '.join(get_args(Weights))}")
    if precision is not None and precision not in (*DTYPES, *QUANTIZED):
        known = ", ".join((*DTYPES, *QUANTIZED))
        raise ConfigError(f"precision is {precision!r}: take one of {known}, or None for the model's own")
    if precision in QUANTIZED and weights == "disk":
        raise ConfigError(
            f"precision={precision!r} is made in host memory, and weights='disk' reads files: take weights='host'"
        )
    check_range("batch", batch, 1)
    check_range("context", context, 1)
