"""What each rank writes of an engine.

A rank writes the elements that it owns in the layout. Where states are replicated, every rank has all of them and still
writes only its own shard: no rank gathers, and no element is written twice.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from shardwise._version import __version__
from shardwise.checkpoint.checkpointable import Checkpointable, ModelParts, overlaps, slots_of
from shardwise.checkpoint.files import TensorSlice, as_bytes, joined
from shardwise.checkpoint.hub_folder import config_text
from shardwise.checkpoint.manifest import version_of
from shardwise.checkpoint.plain import rng_states, to_plain
from shardwise.optim.optimizers import single
from shardwise.optim.states import extras_of, state_views
from shardwise.partition.layout import Slot, Span
from shardwise.partition.stored import stored_tensors
from shardwise.tensors import dtype_name
from shardwise.unit.state_view import StateView
from shardwise.unit.unit import Unit

_ALIGNMENT = 16
# These options say how a machine runs the kernel. All others are part of the training and are saved.
_NOT_SAVED = ("params", "fused", "foreach", "capturable", "differentiable")


@dataclass
class RankContents:
    """What one rank writes: `slices` into its file; `extras` and `rng` into the manifest; on the first rank of each
    stage `params`, the facts about each (None: its values are left out); on rank 0 `head`, the rest of the manifest."""

    slices: list[TensorSlice]
    extras: dict[str, dict[str, Any]]
    rng: Any
    params: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    head: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OwnBuffers:
    """The buffers that a rank writes: `first` of those that no rank before it has; `differing`, its own values."""

    first: set[str]
    differing: set[str]


def contents_of(model: ModelParts, state: Any, buffers: OwnBuffers, staged: bool, frozen: bool) -> RankContents:
    """What this rank writes of `model`, and on rank 0 also of `state`; copied to host memory if `staged`.

    Without `frozen`, the values of frozen parameters are left out.
    """
    rank, device, tensors = model.everyone.rank, model.first.comm.device, dict[str, torch.Tensor]()
    extras: dict[str, dict[str, Any]] = defaultdict(dict)
    for engine in model.engines:
        for name, key, value in _extras(engine):
            if name not in model.tied:
                extras[name][key] = to_plain(value, tensors, f"extra/{key}/{name}")
    rng = to_plain(rng_states(device), tensors, f"rank-{rank}/rng")
    values = model.buffers
    tensors.update({f"rank-{rank}/buffer/{name}": values[name] for name in buffers.differing})
    tensors.update({f"buffer/{name}": values[name] for name in values if name in buffers.first})
    params: dict[str, dict[str, Any] | None] = {}
    for engine in model.engines:
        params |= _params(engine, model.tied, frozen) if engine.comm.everyone.rank == 0 else {}
    head = _head(model, state, tensors) if rank == 0 else {}
    slices = [each for engine in model.engines for each in owned_slices(engine, engine.optimizer, frozen, model.tied)]
    slices += [TensorSlice.whole(key, tensor) for key, tensor in tensors.items()]
    # Joined last: each piece is staged by itself.
    slices = joined(_staged(slices, device) if staged else slices)
    return RankContents(slices, dict(extras), rng, params, head)


def _staged(slices: list[TensorSlice], device: torch.device) -> list[TensorSlice]:
    """A copy in host memory, so that training can continue; `device` is where most values are."""
    on_device = device.type == "cuda"
    sizes = [-(-each.size_bytes // _ALIGNMENT) * _ALIGNMENT for each in slices]
    parts = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=on_device).split(sizes)
    pairs = zip(slices, parts, strict=True)
    copies = [each.copied_to(part[: each.size_bytes].view(each.dtype)) for each, part in pairs]
    if on_device:
        # The copies are asynchronous. The thread that writes them does not wait for the stream, so the host waits
        # here: test_gpu's test_resuming_is_never_having_stopped.
        torch.cuda.current_stream(device).synchronize()
    return copies


def own_buffers(model: ModelParts) -> OwnBuffers:
    """Which buffers this rank writes. Running statistics of local batches differ from rank to rank. A collective."""
    mine = {name: hashlib.sha256(as_bytes(buffer)).hexdigest() for name, buffer in model.buffers.items()}
    everyone = model.everyone
    before = everyone.share_object(mine, "checkpoint, buffers")[: everyone.rank] if mine or model.pp > 1 else []
    theirs = {name: digest for each in reversed(before) for name, digest in each.items()}
    differing = {name for name, digest in mine.items() if theirs.get(name, digest) != digest}
    return OwnBuffers(mine.keys() - theirs.keys(), differing)


def owned_slices(
    engine: Checkpointable,
    optimizer: torch.optim.Optimizer | None,
    frozen: bool = True,
    tied: Collection[str] = (),
) -> Iterator[TensorSlice]:
    """The values that this rank owns in the layout, and the states of `optimizer`: without `frozen`, not those of
    frozen parameters, and never those of `tied` ones, which another stage writes."""
    for unit in engine.units if frozen else filter(attrgetter("is_trainable"), engine.units):
        owned = unit.layout.shard(engine.comm.shard_index)
        for view in state_views(unit, optimizer):
            for slot, part in overlaps(unit, view.span.intersect(owned)):
                tp, key = slot.spec.part, f"{view.key}/{slot.spec.name}"
                if slot.spec.name not in tied and (tp is None or tp.is_counted):
                    elements = part.shift((tp.start if tp is not None else 0) - slot.span.start)
                    yield TensorSlice(key, view.dtype, slot.spec.whole_shape, elements, _shifted(view, part.start), tp)


def _extras(engine: Checkpointable) -> Iterator[tuple[str, str, Any]]:
    """Extras of the parameters whose first element this rank owns."""
    for unit in engine.units:
        owned = unit.layout.shard(engine.comm.shard_index)
        for extra in extras_of(unit, engine.optimizer):
            for slot, part in overlaps(unit, extra.span.intersect(owned)):
                if part.start == slot.span.start and (slot.spec.part is None or slot.spec.part.index == 0):
                    yield slot.spec.name, extra.key, extra.value


def _head(model: ModelParts, state: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    engine, (world_size, tp, pp) = model.first, model.layout
    training = {**engine.progress(), "groups": None, "lr_scheduler": None}
    if engine.optimizer is not None:
        training["groups"] = [group_options(group) for group in engine.optimizer.param_groups]
    if engine.lr_scheduler is not None:
        training["lr_scheduler"] = engine.lr_scheduler.state_dict()
    return {
        "steps": engine.steps,
        "version": version_of(tp, pp),
        "world_size": world_size,
        "tp": tp,
        "pp": pp,
        "written_by": f"shardwise {__version__}, torch {torch.__version__}",
        "optimizer": optimizer_name(engine.optimizer) if engine.optimizer is not None else None,
        "training": to_plain(training, tensors, "training"),
        "state": to_plain(state, tensors, "state"),
        "config": config_text(engine.module),
        "order": model.names,
    }


def _params(engine: Checkpointable, tied: Mapping[str, str], frozen: bool) -> dict[str, dict[str, Any] | None]:
    """Shape, dtype, group and other names of every parameter, in the model's order."""
    slots, seen = slots_of(engine), set[int]()
    others: dict[str, list[str]] = defaultdict(list)
    for other, name in tied.items():
        others[name].append(other)
    for name, param in stored_tensors(engine.module, remove_duplicate=False).items():
        if id(param) in seen:
            others[slots[id(param)][1].spec.name].append(name)
        seen.add(id(param))
    return {
        slot.spec.name: _facts(unit, slot, others[slot.spec.name]) if frozen or unit.is_trainable else None
        for unit, slot in slots.values()
        if slot.spec.name not in tied
    }


def _facts(unit: Unit, slot: Slot, aliases: list[str]) -> dict[str, Any]:
    policy = unit.weights.policy
    return {
        "shape": slot.spec.whole_shape,
        "dtype": dtype_name(policy.master_dtype),
        "compute": dtype_name(policy.weight_dtype),
        "group": slot.spec.group if unit.is_trainable else None,
        "aliases": aliases,
    }


def _shifted(view: StateView, start: int) -> Callable[[Span], torch.Tensor]:
    return lambda part: view.read(part.shift(start))


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an optimizer's parameter group that are part of the training."""
    return {key: value for key, value in group.items() if key not in _NOT_SAVED}


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """The class of an optimizer; all classes, where several optimizers share the parameters."""
    return " + ".join(type(each).__name__ for each in single(optimizer))
