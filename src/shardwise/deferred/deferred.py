"""`shardwise.deferred_init`: build a model larger than memory without its values, which go straight into shards."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.comm import Comm
from shardwise.deferred.pretrained import PretrainedParam, PretrainedWeights, close_files
from shardwise.deferred.recording import DeferredView, deferred_storage, random_operations, recording, session_of, value
from shardwise.errors import ConfigError
from shardwise.partition.dtensors import is_dtensor, like, local, locals_of, part_of
from shardwise.tensors import blank
from shardwise.unit.master import ORIGIN


@dataclass(frozen=True)
class DeferredSession:
    """The arguments of one `deferred_init`: the device to train on, and the files with the weights."""

    device: torch.device
    weights: PretrainedWeights | None = None


@contextlib.contextmanager
def deferred_init(
    weights: str | os.PathLike[str] | None = None, *, device: Any = None, strict: bool = True
) -> Iterator[None]:
    """Within it, models are built without memory for their weights; `initialize` then computes each rank's shards.

    The values are bit for bit those of a model that is built ordinarily, however its code uses random numbers. With
    `weights`, they are read from files instead: a safetensors file, the index of a sharded checkpoint, or a folder with
    either. Each rank reads only what it needs. With `strict`, names in the files that the model lacks are an error.

    `device` is where the model will train: by default this rank's GPU (`LOCAL_RANK`), or the CPU if there is no GPU.

    >>> import torch, shardwise
    >>> with shardwise.deferred_init(device="cpu"):
    ...     model = torch.nn.Linear(1000, 1000)
    >>> model.weight.is_meta
    True
    >>> engine = shardwise.initialize(model, torch.optim.AdamW(model.parameters()), "zero3")
    """
    session = DeferredSession(device_for(device), PretrainedWeights(weights, strict) if weights is not None else None)
    with recording(session, draws=session.weights is None):
        yield


def session_behind(model: nn.Module) -> DeferredSession | None:
    """The session of the `deferred_init` in which a model was built; None for a model that was built ordinarily."""
    tensors = (*locals_of(model.parameters()), *model.buffers())
    return next((session for tensor in tensors if (session := session_of(tensor))), None)


def prepare(model: nn.Module, session: DeferredSession, comm: Comm) -> None:
    """Compute the model's buffers, and give each deferred parameter an `ORIGIN`, from which units read its values."""
    stored = session.weights.match(model) if session.weights is not None else {}
    if session.weights is None:
        _share_generator_states(model, comm)
    for name, param in model.named_parameters():
        if (found := stored.get(name)) is not None:
            part = part_of(param, comm.model_group.size, comm.model_group.rank)
            origin: Any = dataclasses.replace(found, part=part)
        elif (view := DeferredView.of(local(param))) is not None:
            origin = view.read
        else:
            _become(param, local(param).to(comm.device))
            comm.broadcast(local(param).data)
            continue
        # Off the meta device without allocating it; optimizers that refer to it stay valid.
        _become(param, blank(param.dtype, comm.device).expand(local(param).shape))
        setattr(param, ORIGIN, origin)
    fill_buffers(model, stored, comm.device)


def finish() -> None:
    """Close files and free recordings, when all units have their values."""
    close_files()
    gc.collect()  # storages and their operations refer to each other


def check_deferred(model: nn.Module) -> None:
    """Raise a ConfigError for a parameter on the meta device of which no operations were recorded."""
    for name, param in model.named_parameters():
        if param.is_meta and is_dtensor(param) and deferred_storage(local(param)) is None:
            raise ConfigError(
                f"parameter {name!r} is a DTensor on the meta device and has no values: call parallelize_module(..., "
                "src_data_rank=None) inside `with shardwise.deferred_init():`, or materialise it first"
            )
        if param.is_meta and deferred_storage(local(param)) is None:
            raise ConfigError(
                f"parameter {name!r} is on the meta device and has no values: build the model under "
                "shardwise.deferred_init(), where it is also cast (model.to(dtype)), or materialise it first"
            )


def device_for(given: Any) -> torch.device:
    """The device that was given, or this rank's GPU, or the CPU."""
    if given is not None:
        return torch.device(given)
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


def _share_generator_states(model: nn.Module, comm: Comm) -> None:
    """Give all ranks the random numbers of rank 0, whose values also count for a model that was built ordinarily."""
    tensors = (*locals_of(model.parameters()), *model.buffers())
    operations = random_operations([each for tensor in tensors if (each := deferred_storage(tensor)) is not None])
    counts = comm.share_object(len(operations))
    if len(set(counts)) > 1:
        raise RuntimeError(
            f"the ranks drew random numbers {counts} times while they built the model: build the same one on all ranks"
        )
    states = [operation.state for operation in operations if operation.state is not None]
    if not states or comm.everyone.world_size == 1:
        return
    joined = torch.cat(states).to(comm.device)
    comm.model_group.broadcast(joined)
    comm.broadcast(joined)
    for operation, state in zip(operations, joined.cpu().split([len(state) for state in states]), strict=True):
        operation.state = state.clone()


def _become(param: nn.Parameter, values: torch.Tensor) -> None:
    """Give a parameter other values, on any device."""
    with torch.no_grad():
        real = nn.Parameter(like(param, values), requires_grad=param.requires_grad)
    real.__dict__.update(param.__dict__)
    real.__class__ = param.__class__
    torch.utils.swap_tensors(param, real)


def fill_buffers(model: nn.Module, stored: dict[str, PretrainedParam], device: torch.device) -> None:
    """Compute buffers, and tensors that are plain attributes of modules, whole on every rank."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the old tensor too: while it lives, its id is unique
    for path, module in model.named_modules():
        for holder, is_buffer in ((module._buffers, True), (module.__dict__, False)):
            for key, tensor in list(holder.items()):
                if not isinstance(tensor, torch.Tensor) or not (is_buffer or deferred_storage(tensor) is not None):
                    continue
                if id(tensor) not in made:
                    is_persistent = is_buffer and key not in module._non_persistent_buffers_set
                    source = stored.get(f"{path}.{key}" if path else key) if is_persistent else None
                    values = source.whole() if source is not None else value(tensor)
                    made[id(tensor)] = tensor, values.to(device, tensor.dtype)
                holder[key] = made[id(tensor)][1]
