"""The engine as checkpoints see it: the state they read and write, and work that succeeds or fails on all ranks.

Checkpoints stand below the engine and know it only as a `Checkpointable`. mypy checks that `Engine` is one, where the
engine passes itself to this package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import nn

from shardwise.comm.comm import Comm
from shardwise.errors import CheckpointError, DamagedError
from shardwise.optim.optimizers import members
from shardwise.partition.layout import Slot, Span
from shardwise.unit.unit import Unit

T = TypeVar("T")

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


def on_all_ranks(comm: Comm | None, work: Callable[[], T]) -> T:
    """This rank's result of `work`; a CheckpointError on all ranks if any of them failed. A collective.

    Without `comm`, this process does the work alone.
    """
    if comm is None:
        return work()
    results: list[T] = []
    _run(comm, lambda: results.append(work()))
    return results[0]


def on_rank_0(comm: Comm | None, work: Callable[[], T]) -> T:
    """Rank 0's result of `work`, on all ranks; a CheckpointError on all ranks if it failed. As `on_all_ranks`."""
    if comm is None:
        return work()
    return cast(T, _run(comm, lambda: work() if comm.rank == 0 else None)[0])


def _run(comm: Comm, work: Callable[[], T]) -> list[T]:
    """The results of all ranks. Damage that another checkpoint can make up for stays a DamagedError."""
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


def config_text(model: nn.Module) -> str | None:
    """The text of a Hugging Face model's `config.json`; None for a model without a configuration."""
    to_text = getattr(getattr(model, "config", None), "to_json_string", None)
    return str(to_text()) if to_text is not None else None
