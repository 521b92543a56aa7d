"""What a rank writes of an engine: each element by its owner in the layout, and by nobody else.

Where states are replicated every rank holds everything, and still writes only its own shard: no rank gathers, none
writes what another one writes.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise._version import __version__
from shardwise.checkpoint import rng
from shardwise.checkpoint.plain import dtype_name, to_plain
from shardwise.optim.optimizers import members
from shardwise.optim.states import extras_of, state_views
from shardwise.partition.layout import Slot, Span
from shardwise.unit.state_view import StateView
from shardwise.unit.unit import Unit

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine

# How a group's kernel is run is this machine's affair; the rest of its options is part of the training.
_NOT_SAVED = ("params", "fused", "foreach", "capturable", "differentiable")


@dataclass(frozen=True)
class Item:
    """A run of a tensor's flat elements to be written; `read` gives any part of them."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    elements: Span
    read: Callable[[Span], torch.Tensor]

    @property
    def size_bytes(self) -> int:
        return self.elements.numel * self.dtype.itemsize


@dataclass
class Contents:
    """What one rank writes: items into its file; `extras` and `rng` into the manifest; `head`, all else in it."""

    items: list[Item]
    extras: dict[str, dict[str, Any]]
    rng: Any
    head: dict[str, Any] = field(default_factory=dict)

    def staged(self, device: torch.device) -> Contents:
        """The same, copied to host memory, so that training may go on; `device` is where most of it is."""
        on_device = device.type == "cuda"
        total = sum(-(-item.size_bytes // 16) * 16 for item in self.items)
        arena = torch.empty(total, dtype=torch.uint8, pin_memory=on_device)
        items, start = [], 0
        for item in self.items:
            copy = arena[start : start + item.size_bytes].view(item.dtype)
            copy.copy_(item.read(Span(0, item.elements.numel)), non_blocking=True)
            items.append(replace(item, read=_reader(copy)))
            start += -(-item.size_bytes // 16) * 16
        if on_device:
            torch.cuda.current_stream(device).synchronize()
        return replace(self, items=items)


def contents_of(engine: Engine, state: Any, own_buffers: set[str]) -> Contents:
    """What this rank writes of `engine`, and of the user's `state` if it is rank 0."""
    rank, tensors = engine.comm.rank, dict[str, torch.Tensor]()
    extras: dict[str, dict[str, Any]] = defaultdict(dict)
    for unit in engine.units:
        for name, key, value in _extras(unit, engine):
            extras[name][key] = to_plain(value, tensors, f"extra/{key}/{name}")
    states = to_plain(rng.capture(engine.comm.device), tensors, f"rank-{rank}/rng")
    buffers = persistent_buffers(engine.module)
    tensors.update({f"rank-{rank}/buffer/{name}": buffers[name] for name in own_buffers})
    tensors.update({f"buffer/{name}": buffer for name, buffer in buffers.items()} if rank == 0 else {})
    head = _head(engine, state, tensors) if rank == 0 else {}
    items = [item for unit in engine.units for item in _items(unit, engine)]
    items += [_whole(key, tensor) for key, tensor in tensors.items()]
    return Contents(items, dict(extras), states, head)


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that belong to the model's state, each under its first name."""
    hidden = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in model.named_buffers() if name not in hidden}


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an optimizer's parameter group that are part of the training."""
    return {key: value for key, value in group.items() if key not in _NOT_SAVED}


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """The class of an optimizer, or those of all that work together."""
    everyone = members(optimizer)
    return " + ".join(type(each).__name__ for each in (everyone[1:] or everyone))


def config_text(model: nn.Module) -> str | None:
    """The text of a Hugging Face model's `config.json`."""
    to_text = getattr(getattr(model, "config", None), "to_json_string", None)
    return str(to_text()) if to_text is not None else None


def overlaps(unit: Unit, span: Span) -> Iterator[tuple[Slot, Span]]:
    """The tensors of a unit that `span` of its flat buffer touches, and the common part."""
    for slot in unit.layout.slots:
        part = slot.span.intersect(span)
        if part:
            yield slot, part


def _items(unit: Unit, engine: Engine) -> Iterator[Item]:
    mine = unit.layout.shard(engine.comm.rank)
    for held in state_views(unit, engine.optimizer):
        for slot, part in overlaps(unit, held.span.intersect(mine)):
            elements = part.shift(-slot.span.start)
            key = f"{held.key}/{slot.spec.name}"
            yield Item(key, held.dtype, slot.spec.shape, elements, _shifted(held, part.start))


def _extras(unit: Unit, engine: Engine) -> Iterator[tuple[str, str, Any]]:
    """Extras of the parameters whose first element this rank owns."""
    mine = unit.layout.shard(engine.comm.rank)
    for extra in extras_of(unit, engine.optimizer):
        for slot, part in overlaps(unit, extra.span.intersect(mine)):
            if part.start == slot.span.start:
                yield slot.spec.name, extra.key, extra.value


def own_buffers(engine: Engine) -> set[str]:
    """The buffers that are not as on rank 0, such as running statistics of local batches. A collective."""
    mine = {name: _digest(buffer) for name, buffer in persistent_buffers(engine.module).items()}
    theirs = engine.comm.share_object(mine, "checkpoint, buffers")[0] if mine else {}
    return {name for name, digest in mine.items() if digest != theirs.get(name)}


def _head(engine: Engine, state: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    training = {**engine.progress(), "groups": None, "lr_scheduler": None}
    if engine.optimizer is not None:
        training["groups"] = [group_options(group) for group in engine.optimizer.param_groups]
    if engine.lr_scheduler is not None:
        training["lr_scheduler"] = engine.lr_scheduler.state_dict()
    return {
        "steps": engine.steps,
        "world_size": engine.comm.world_size,
        "written_by": f"shardwise {__version__}, torch {torch.__version__}",
        "optimizer": optimizer_name(engine.optimizer) if engine.optimizer is not None else None,
        "training": to_plain(training, tensors, "training"),
        "state": to_plain(state, tensors, "state"),
        "config": config_text(engine.module),
        "params": _params(engine),
    }


def _params(engine: Engine) -> dict[str, dict[str, Any]]:
    """Shape, dtype, group and other names of every parameter, in the model's order."""
    slots = {slot.spec.name: (unit, slot) for unit in engine.units for slot in unit.layout.slots}
    params: dict[str, dict[str, Any]] = {}
    first: dict[int, str] = {}
    for name, param in engine.module.named_parameters(remove_duplicate=False):
        if id(param) in first:
            params[first[id(param)]]["aliases"].append(name)
            continue
        first[id(param)] = name
        unit, slot = slots[name]
        group = slot.spec.group if unit.is_trainable else None
        dtype = unit.weights.policy.master_dtype
        compute = dtype_name(unit.weights.policy.weight_dtype)
        params[name] = {"shape": slot.spec.shape, "dtype": dtype, "compute": compute, "group": group, "aliases": []}
    return params


def _whole(key: str, tensor: torch.Tensor) -> Item:
    flat = tensor.detach().reshape(-1)
    return Item(key, tensor.dtype, tuple(tensor.shape), Span(0, flat.numel()), _reader(flat))


def _reader(flat: torch.Tensor) -> Callable[[Span], torch.Tensor]:
    return lambda part: flat[part.slice]


def _shifted(held: StateView, start: int) -> Callable[[Span], torch.Tensor]:
    return lambda part: held.read(part.shift(start))


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()
