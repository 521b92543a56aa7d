"""Habits from plain torch and other libraries that have another effect here: what an engine says about each, once."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from shardwise.comm import Comm
from shardwise.config import Config
from shardwise.errors import ConfigError, Notices
from shardwise.partition.policy import DTYPE_NAMES
from shardwise.tensors import tensors_in


def in_model_dtype(config: Config, model: nn.Module, notices: Notices) -> Config:
    """The configuration with `precision.compute: model` resolved; says so if the default changes the model's dtype."""
    dtypes = {
        param.dtype
        for param in model.parameters()
        if param.is_floating_point() and (param.requires_grad or param.dtype.itemsize > 1)
    }
    narrow = [DTYPE_NAMES[dtype] for dtype in dtypes if dtype in (torch.bfloat16, torch.float16)]
    is_default = config.precision.compute == "fp32" and config.origin("precision.compute").kind == "default"
    if torch.float64 in dtypes and is_default:
        notices.say(
            "narrowed",
            "the model has fp64 parameters, and they are narrowed to fp32, the most precise dtype of an engine: set "
            "precision.compute: fp32 if this is meant, or train in plain torch",
        )
    if narrow and is_default:
        notices.say(
            "widened",
            f"the model has {' and '.join(sorted(narrow))} parameters, and they are widened to fp32, because the "
            "configuration does not give a precision: set precision.compute: model to keep their dtype (with fp32 "
            "master copies), or precision.compute: fp32 if this is meant",
        )
    if config.precision.compute == "model" and (unknown := dtypes - DTYPE_NAMES.keys()):
        raise ConfigError(
            f"precision.compute is model, and the model has parameters of {unknown.pop()}: convert them to fp32, bf16 "
            "or fp16, or set precision.compute to one of these"
        )
    return config.for_dtypes([DTYPE_NAMES[dtype] for dtype in dtypes if dtype in DTYPE_NAMES])


def notice_division(loss: torch.Tensor, count: int, notices: Notices) -> None:
    """Warn that the loss was divided by the number of micro-batches before `engine.backward` divides it."""
    if _is_quotient(loss, count):
        notices.say(
            "loss divided",
            f"the loss was divided by {count}, and engine.backward divides it by batch.accumulation, which is {count} "
            "too: if yours is the division for accumulation, leave it out, or call engine.backward(loss, scale=False)",
        )


def _is_quotient(loss: torch.Tensor, count: int) -> bool:
    """Whether the loss is `something / count`, where that is not plainly the mean of `count` terms or samples."""
    made = loss.grad_fn
    if made is None or made.name() != "DivBackward0":
        return False
    divisor: Any = made._saved_other  # type: ignore[attr-defined]  # of this node
    # A Python number; the value of any other tensor may not be computed yet.
    is_number = divisor.ndim == 0 and divisor.device.type == "cpu" and divisor.dtype in (torch.int64, torch.float64)
    if not is_number or divisor.item() != count:
        return False
    inside = made.next_functions[0][0]
    is_sum = inside is None or inside.name().startswith(("Sum", "Add")) or getattr(inside, "_saved_reduction", 0) == 2
    return not is_sum


class InputWatch:
    """Compares the inputs of all ranks once: data-parallel ranks that all train on the same data learn no more than
    one, and ranks that hold one copy of the model together (tp) compute on the same data.

    A checksum of one forward in each of a few steps is kept on the device. Inputs that are the same in every step are
    taken for those of a test.
    """

    STEPS = 3
    _LEAST_NUMEL = 16  # less is a counter or a flag, not data

    def __init__(self, comm: Comm, notices: Notices) -> None:
        self._device = comm.device
        self._notices = notices
        self._sums: list[torch.Tensor] = []
        self._is_over = not (comm.is_checked or comm.model_group.size > 1)
        self.is_open = False
        """Whether the next forward is one to look at."""

    def note(self, *inputs: Any) -> None:
        """Before a forward that trains."""
        if not self.is_open or self._is_over:
            return
        self.is_open = False
        dense = (tensor for tensor in tensors_in(*inputs) if tensor.layout == torch.strided)
        tensors = [tensor for tensor in dense if not tensor.is_complex()]
        if sum(tensor.numel() for tensor in tensors) >= self._LEAST_NUMEL:
            sums = [tensor.detach().sum(dtype=torch.float64).to(self._device) for tensor in tensors]
            self._sums.append(torch.stack([each * place for place, each in enumerate(sums, 1)]).sum())

    def checksums(self) -> torch.Tensor:
        """A checksum for each of the steps that were looked at, NaN where there was nothing to see."""
        blank = torch.full((), float("nan"), dtype=torch.float64, device=self._device)
        return torch.stack((self._sums + [blank] * self.STEPS)[: self.STEPS])

    def compare(self, everyone: torch.Tensor, copy: torch.Tensor) -> None:
        """Warn if the checksums of all data-parallel ranks, the rows, are equal, or those of the ranks of one copy of
        the model are not. Waits for the device, once."""
        if self._is_over:
            return
        self._is_over = True
        self._sums = []
        rows, together = everyone.tolist(), copy.nan_to_num().tolist()
        if any(row != together[0] for row in together):
            self._notices.say(
                "other data in a copy",
                f"the {len(together)} tensor-parallel ranks that hold one copy of the model were given different "
                "inputs, and layers that are cut add up what belongs to one input: choose the batch by the "
                'data-parallel rank, mesh["dp"].get_local_rank(). If each rank has its part of the sequence, this is '
                "meant",
            )
        if len(rows) > 1 and all(row == rows[0] for row in rows) and len(set(rows[0])) == self.STEPS:
            self._notices.say(
                "same data",
                f"all {len(rows)} ranks were given the same inputs, so together they learn no more than one: give each "
                "rank its own part of the data, with torch.utils.data.DistributedSampler (and sampler.set_epoch), or "
                "by its rank",
            )


def check_scheduler(scheduler: Any) -> None:
    """Refuse a scheduler whose step needs more than the engine knows."""
    arguments = inspect.signature(scheduler.step).parameters.values()
    needed = [each.name for each in arguments if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    if needed:
        kind = type(scheduler).__name__
        raise ConfigError(
            f"lr_scheduler {kind}: its step needs {', '.join(needed)}, which engine.step() does not have: leave "
            f"lr_scheduler out, build the {kind} on engine.optimizer, and call its step yourself"
        )


class SchedulerSteps:
    """Steps a scheduler, and says if the user's loop steps it as well."""

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self._count: int | None = None
        self._doubled = 0

    def step(self, scheduler: Any) -> None:
        """After an update."""
        # Twice in a row: a single jump may be a state that was loaded, or a step that is meant.
        is_ahead = self._count is not None and getattr(scheduler, "_step_count", None) == self._count + 1
        self._doubled = self._doubled + 1 if is_ahead else 0
        if self._doubled == 2:
            self._notices.say(
                "scheduler stepped twice",
                "the lr_scheduler that was given to shardwise.initialize is stepped by engine.step(), and the training "
                "loop steps it too, so it advances twice a step: remove scheduler.step() from the loop, or leave "
                "lr_scheduler out of shardwise.initialize",
            )
        scheduler.step()
        self._count = getattr(scheduler, "_step_count", None)
