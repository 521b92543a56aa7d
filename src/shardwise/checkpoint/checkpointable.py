"""Engines as checkpoints see them: what they need of one, what each rank writes, work that all ranks do or none.

Checkpoints stand below the engine and know it only as a `Checkpointable`. mypy checks that `Engine` is one, where the
engine passes itself to this package. A rank has one engine, or in a pipeline one for each of its stages: `ModelParts`.

A rank writes the elements that it owns in the layout. Where states are replicated, every rank has all of them and still
writes only its own shard: no rank gathers, and no element is written twice.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import nn

from shardwise._version import __version__
from shardwise.checkpoint.companions import config_text
from shardwise.checkpoint.files import TensorSlice, as_bytes, joined
from shardwise.checkpoint.manifest import version_of
from shardwise.checkpoint.plain import dtype_name, rng_states, to_plain
from shardwise.comm import Comm
from shardwise.comm.model_group import Everyone
from shardwise.errors import CheckpointError, DamagedError
from shardwise.optim.optimizers import members
from shardwise.optim.states import extras_of, state_views
from shardwise.partition.layout import Slot, Span
from shardwise.partition.stored import stored_tensors
from shardwise.unit.state_view import StateView
from shardwise.unit.unit import Unit

T = TypeVar("T")

_ALIGNMENT = 16
# These options say how a machine runs the kernel. All others are part of the training and are saved.
_NOT_SAVED = ("params", "fused", "foreach", "capturable", "differentiable")


class Checkpointable(Protocol):
    """What saving, loading and exporting need of an engine.

    is_at_rest    whether no gradients are accumulated, which a checkpoint does not hold
    progress      counters, loss scale and averages; `set_progress` continues from them
    """

    @property
    def comm(self) -> Comm: ...

    @property
    def module(self) -> nn.Module: ...

    @property
    def units(self) -> Sequence[Unit]: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer | None: ...

    @property
    def lr_scheduler(self) -> Any: ...

    @property
    def steps(self) -> int: ...

    @property
    def is_at_rest(self) -> bool: ...

    def progress(self) -> dict[str, Any]: ...

    def set_progress(self, progress: Mapping[str, Any]) -> None: ...

    def zero_grad(self) -> None: ...


@dataclass(frozen=True)
class ModelParts:
    """A model as checkpoints see it: the engines of this rank, and all ranks that train the model together.

    engines   one, or in a pipeline those of this rank's stages
    everyone  the ranks of all axes
    pp        how many ranks a pipeline has
    names     the parameters and buffers of all stages in the model's order, where other ranks have other stages
    tied      parameters of this rank's stages that an earlier stage has too: their names there
    """

    engines: Sequence[Checkpointable]
    everyone: Everyone
    pp: int = 1
    names: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, engine: Checkpointable) -> ModelParts:
        return cls((engine,), engine.comm.everyone)

    @property
    def first(self) -> Checkpointable:
        """An engine of this rank; all have the same counters, options and device."""
        return self.engines[0]

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The persistent buffers of this rank's engines."""
        return {name: each for engine in self.engines for name, each in persistent_buffers(engine.module).items()}

    @property
    def layout(self) -> tuple[int, int, int]:
        """The sizes of the axes that decide what a rank holds: of all ranks, of tp and of pp."""
        return self.everyone.world_size, self.first.comm.model_group.size, self.pp


def on_all_ranks(comm: Everyone | None, work: Callable[[], T]) -> T:
    """This rank's result of `work`; a CheckpointError on all ranks if any failed. A collective if `comm` is given."""
    results: list[T] = []
    _run(comm, lambda: results.append(work()))
    return results[0]


def on_rank_0(comm: Everyone | None, work: Callable[[], T]) -> T:
    """Rank 0's result of `work`, on all ranks; a CheckpointError on all ranks if it failed. As `on_all_ranks`."""
    return cast(T, _run(comm, lambda: work() if comm is None or comm.rank == 0 else None)[0])


def _run(comm: Everyone | None, work: Callable[[], T]) -> list[T]:
    """The results of all ranks. Damage that another checkpoint can make up for stays a DamagedError."""
    if comm is None:
        return [work()]
    value: T | None = None
    failure: Exception | None = None
    try:
        value = work()
    except Exception as error:
        failure = error
    message = None if failure is None else f"rank {comm.rank}: {failure or type(failure).__name__}"
    outcomes = comm.share_object((value, message, isinstance(failure, DamagedError)), "checkpoint")
    failed = {message: is_damage for _, message, is_damage in outcomes if message is not None}
    if failed:
        raise (DamagedError if all(failed.values()) else CheckpointError)("; ".join(failed)) from failure
    return [value for value, _, _ in outcomes]


def overlaps(unit: Unit, span: Span) -> Iterator[tuple[Slot, Span]]:
    """The tensors of a unit that `span` of its flat buffer touches, each with the common part."""
    for slot in unit.layout.slots:
        part = slot.span.intersect(span)
        if part:
            yield slot, part


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that belong to the model's state_dict, each under its first name."""
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
    """The class of an optimizer; all classes, where several optimizers share the parameters."""
    everyone = members(optimizer)
    return " + ".join(type(each).__name__ for each in (everyone[1:] or everyone))


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
    mine = {name: _digest(buffer) for name, buffer in model.buffers.items()}
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
    """The values that this rank owns in the layout, and the states of `optimizer`; of `frozen` parameters if so, and
    not of `tied` ones, which another stage has."""
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
    slots = {slot.spec.name: (unit, slot) for unit in engine.units for slot in unit.layout.slots}
    others: dict[str, list[str]] = defaultdict(list)
    for other, name in tied.items():
        others[name].append(other)
    names: dict[int, str] = {}
    for name, param in stored_tensors(engine.module, remove_duplicate=False).items():
        first = names.setdefault(id(param), name)
        if first != name:
            others[first].append(name)
    return {
        name: _facts(*slots[name], others[name]) if frozen or slots[name][0].is_trainable else None
        for name in names.values()
        if name not in tied
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


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(as_bytes(tensor)).hexdigest()
