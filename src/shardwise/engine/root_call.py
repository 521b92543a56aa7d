"""The call of the model itself, wrapped: `model(x)` computes in the configured precision, exactly as `engine(x)`.

torch looks up `_call_impl`, or after `model.compile()` `_compiled_call_impl`, on the instance. Both are replaced there,
so that the user's and the engine's hooks run inside. A submodule that the user calls by itself is not wrapped: its
inputs are not cast, and no autocast is switched on for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.config.sections import Precision
from shardwise.errors import ConfigError
from shardwise.partition.dtensors import uneven_cut
from shardwise.partition.policy import DTYPE_NAMES, DTYPES
from shardwise.schedule import Schedule
from shardwise.schedule.autograd import inside_backward
from shardwise.schedule.hooks import ours
from shardwise.tensors import map_tensors

CALLS = ("_call_impl", "_compiled_call_impl")
_Around = Callable[..., contextlib.AbstractContextManager[Any]]


class RootCall:
    """Wraps the calls of a model until removed. `around(args, kwargs)` is entered for each, outside of all else."""

    def __init__(
        self, model: nn.Module, precision: Precision, device: torch.device, schedule: Schedule, around: _Around
    ) -> None:
        self._model = model
        self._mode = ComputeMode(precision, device)
        self._schedule = schedule
        self._watching: _Around = torch._dynamo.disable(schedule.saved_tensors.watching)
        self._around = around
        self._is_running = False
        self._given = {name: vars(model)[name] for name in CALLS if name in vars(model)}
        untraced: Callable[..., Any] = partial(torch._dynamo.disable, recursive=False)  # what is inside is compiled
        for name in CALLS:
            inner = getattr(model, name)
            if inner is not None:
                vars(model)[name] = ours(partial(untraced(self._run), inner))

    def remove(self) -> None:
        """Give the model its own calls again."""
        for name in CALLS:
            vars(self._model).pop(name, None)
        vars(self._model).update(self._given)

    def _run(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_running:  # the model calls itself
            return inner(*args, **kwargs)
        if inside_backward():  # a recomputation, which torch.utils.checkpoint may end by an exception of its own
            return self._mode.run(inner, args, kwargs)
        self._is_running = True
        try:
            with self._around(args, kwargs), self._watching():
                return self._mode.run(inner, args, kwargs)
        except BaseException as error:
            self._schedule.backward.rest()
            if "Sharding propagation failed" in str(error) and (reason := uneven_cut(self._model)):
                raise ConfigError(reason) from error
            raise
        finally:
            self._is_running = False


class ComputeMode:
    """The dtype that a model computes in: its inputs are cast, or torch.autocast chooses per operation.

    A `torch.autocast` that the user has entered stays in force, unless it contradicts the configuration.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self._precision = precision
        self._kind = device.type
        self._dtype = DTYPES.get(precision.compute)

    def run(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call in this mode."""
        outer = torch.get_autocast_dtype(self._kind) if torch.is_autocast_enabled(self._kind) else None
        if outer is None and not self._precision.autocast:
            return call(*self._cast(args), **self._cast(kwargs))
        if outer is None:
            with torch.autocast(self._kind, self._dtype):
                return call(*args, **kwargs)
        self._check(outer)
        if self._precision.weights_dtype != "fp32":
            args, kwargs = self._cast(args), self._cast(kwargs)
        try:
            return call(*args, **kwargs)
        finally:
            # It holds casts of the weights, which the next update would not change.
            torch.clear_autocast_cache()

    def _cast(self, values: Any) -> Any:
        dtype = self._dtype
        if dtype is None or not self._precision.cast_inputs:
            return values
        return map_tensors(values, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)

    def _check(self, outer: torch.dtype) -> None:
        name, compute = DTYPE_NAMES.get(outer, str(outer)), self._precision.compute
        if self._dtype in (torch.bfloat16, torch.float16) and outer != self._dtype:
            raise ConfigError(
                f"torch.autocast around the model says {name}, and precision.compute says {compute}: "
                "leave the torch.autocast out, or give both the same dtype"
            )
        if outer == torch.float16 and compute != "fp16" and torch.is_grad_enabled():
            raise ConfigError(
                f"torch.autocast around the model computes in fp16, which needs a loss scale, and precision.compute is "
                f"{compute}: set precision.compute: fp16 and precision.autocast: true, and leave torch.autocast and "
                "GradScaler out; the engine then scales the loss"
            )
