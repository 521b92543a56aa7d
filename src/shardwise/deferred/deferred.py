"""`shardwise.deferred_init`: a model larger than memory is built without its values, which go straight into shards."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.comm.comm import Comm
from shardwise.deferred.pretrained import Pretrained, Stored, close_files
from shardwise.deferred.recording import Place, Recording, content, random_operations, session_of, store_of, value
from shardwise.errors import ConfigError
from shardwise.partition.layout import Span
from shardwise.unit.deferred_value import set_origin


@dataclass(frozen=True)
class Session:
    """What a `deferred_init` was told: the device to train on, and the files that have the weights."""

    device: torch.device
    weights: Pretrained | None


@contextlib.contextmanager
def deferred_init(
    weights: str | os.PathLike[str] | None = None, *, device: Any = None, strict: bool = True
) -> Iterator[None]:
    """Within it, models are built without memory for their weights; `initialize` then makes each rank's part of them.

    The values are those that the model would have had, bit for bit, whatever its code does with random numbers. Or they
    are read from `weights`: a safetensors file, a sharded checkpoint's index, or a folder with either; each rank reads
    what it needs. With `strict`, names in the files that the model does not have are an error.

    `device` is where the model will train: by default this rank's GPU (`LOCAL_RANK`), or the CPU where there is none.

    >>> import torch, shardwise
    >>> with shardwise.deferred_init(device="cpu"):
    ...     model = torch.nn.Linear(1000, 1000)
    >>> model.weight.is_meta
    True
    >>> engine = shardwise.initialize(model, torch.optim.AdamW(model.parameters()), "zero3")
    """
    session = Session(_device(device), Pretrained(weights, strict) if weights is not None else None)
    with Recording(session, draws=session.weights is None):
        yield


def session_behind(model: nn.Module) -> Session | None:
    """The session under which a model was built; None for one that was built ordinarily."""
    tensors = (*model.parameters(), *model.buffers())
    session: Session | None = next((found for tensor in tensors if (found := session_of(tensor))), None)
    return session


def prepare(model: nn.Module, session: Session, comm: Comm) -> None:
    """Give the model what is small, and each parameter an origin, from which the units take their values."""
    stored = session.weights.match(model) if session.weights is not None else {}
    if session.weights is None:
        _agree(model, comm)
    for name, param in model.named_parameters():
        if name in stored:
            _become_real(param, comm.device)
            set_origin(param, stored[name])
        elif (store := store_of(param)) is not None:
            place = Place.of(param, store)
            _become_real(param, comm.device)
            set_origin(param, Recorded(place))
        else:
            param.data = param.data.to(comm.device)
            comm.broadcast(param.data)
    _fill_buffers(model, stored, comm.device)


def finish() -> None:
    """Once all units have their values: let go of files and recordings (operations and tensors know each other)."""
    close_files()
    gc.collect()


@dataclass(frozen=True)
class Recorded:
    """Values to be made by repeating what was recorded."""

    place: Place

    def read(self, part: Span) -> torch.Tensor:
        return self.place.on(content(self.place.store)).reshape(-1)[part.slice]


def check_deferred(model: nn.Module) -> None:
    """Parameters on meta must be ours: nobody else's have values to come."""
    for name, param in model.named_parameters():
        if param.is_meta and store_of(param) is None:
            raise ConfigError(
                f"parameter {name!r} is on the meta device and has no values: build the model under "
                "shardwise.deferred_init(), where it is also cast (model.to(dtype)), or materialise it first"
            )


def _device(given: Any) -> torch.device:
    if given is not None:
        return torch.device(given)
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


def _agree(model: nn.Module, comm: Comm) -> None:
    """Rank 0's random numbers count, as its values do for a model that was built ordinarily."""
    tensors = (*model.parameters(), *model.buffers())
    operations = random_operations([store for tensor in tensors if (store := store_of(tensor)) is not None])
    counts = comm.share_object(len(operations))
    if len(set(counts)) > 1:
        raise RuntimeError(f"the ranks drew random numbers {counts} times while they built the model: build it alike")
    if not operations or comm.world_size == 1:
        return
    states = [operation.state for operation in operations if operation.state is not None]
    everything = torch.cat(states).to(comm.device)
    comm.broadcast(everything)
    parts = everything.cpu().split([len(state) for state in states])
    for operation, state in zip(operations, parts, strict=True):
        operation.state = state.clone()


def _become_real(param: nn.Parameter, device: torch.device) -> None:
    """Take a parameter off the meta device while it still has no memory; it stays the object that optimizers hold."""
    blank = torch.full((), float("nan") if param.is_floating_point() else 0, dtype=param.dtype, device=device)
    real = nn.Parameter(blank.expand(param.shape), requires_grad=param.requires_grad)
    real.__dict__.update(param.__dict__)
    real.__class__ = param.__class__
    torch.utils.swap_tensors(param, real)


def _fill_buffers(model: nn.Module, stored: dict[str, Stored], device: torch.device) -> None:
    """Buffers, and tensors that modules keep as plain attributes, are made whole: every rank needs them so."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the old one, so that its id stays its own
    for path, module in model.named_modules():
        for holder, is_buffer in ((module._buffers, True), (module.__dict__, False)):
            for key, tensor in list(holder.items()):
                if not isinstance(tensor, torch.Tensor) or not (is_buffer or store_of(tensor) is not None):
                    continue
                if id(tensor) not in made:
                    lasts = is_buffer and key not in module._non_persistent_buffers_set
                    source = stored.get(f"{path}.{key}" if path else key) if lasts else None
                    made[id(tensor)] = tensor, _made(tensor, source, device)
                holder[key] = made[id(tensor)][1]


def _made(tensor: torch.Tensor, stored: Stored | None, device: torch.device) -> torch.Tensor:
    if stored is not None:
        return stored.whole().to(device, tensor.dtype)
    return (value(tensor) if store_of(tensor) is not None else tensor).to(device)
