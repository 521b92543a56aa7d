"""Engines as checkpoints see them: what they need of one, and work that all ranks do or none.

Checkpoints stand below the engine and know it only as a `Checkpointable`. mypy checks that `Engine` is one, where the
engine passes itself to this package. A rank has one engine, or in a pipeline one for each of its stages: `ModelParts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import nn

from shardwise.comm import Comm
from shardwise.comm.model_group import Everyone
from shardwise.errors import CheckpointError, DamagedError
from shardwise.partition.layout import Slot, Span
from shardwise.partition.stored import stored_tensors
from shardwise.unit.unit import Unit

T = TypeVar("T")


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


def slots_of(engine: Checkpointable) -> dict[int, tuple[Unit, Slot]]:
    """The unit and the slot of each parameter, by its id, in the model's order.

    A slot has the name that the parameter had when the engine was made; a wrapper that was put around a module later
    has changed that in the model.
    """
    known = {
        id(param): (unit, slot)
        for unit in engine.units
        for slot, param in zip(unit.layout.slots, unit.params, strict=True)
    }
    params = stored_tensors(engine.module)
    if added := [name for name, param in params.items() if id(param) not in known]:
        raise CheckpointError(
            f"parameter {added[0]!r} was added to the model after shardwise.initialize, and the engine has no place "
            "for it: add it before, or take it out of the model"
        )
    return {id(param): known[id(param)] for param in params.values()}


def persistent_buffers(model: nn.Module, all_names: bool = False) -> dict[str, torch.Tensor]:
    """The buffers that belong to the model's state_dict, each under its first name, or under all that it has there."""
    hidden = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=not all_names)
        for name in module._non_persistent_buffers_set
    }
    named = model.named_buffers(remove_duplicate=not all_names)
    return {name: buffer for name, buffer in named if name not in hidden}
