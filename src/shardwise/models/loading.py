"""Loads a model and its data: a built-in model by name, or the user's own as `file.py:function`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.errors import ConfigError
from shardwise.models.built_in import BUILT_IN, MakeBatch, ModelAndData


class WorkloadError(ConfigError):
    """The model or its data cannot be used, under any preset."""


SHAPE = "(model, make_batch) with make_batch(rank, step) -> dict of the model's arguments"


def check_name(name: str) -> None:
    """Raise a WorkloadError if no model can have this name. Imports nothing of the user's."""
    if name in BUILT_IN:
        return
    path, function = _split(name)
    if not function:
        raise WorkloadError(
            f"model {name!r} is not known: choose one of {', '.join(BUILT_IN)}, or give file.py:function that "
            f"returns {SHAPE}"
        )
    if not path.is_file():
        raise WorkloadError(f"model {name!r}: there is no file {path}")


def load(name: str, device: str) -> ModelAndData:
    """The model, on `device`, and its data. Every failure is a WorkloadError that names the file."""
    check_name(name)
    with torch.device(device):
        if name in BUILT_IN:
            model, make_batch = BUILT_IN[name].build(), BUILT_IN[name].make_batch
        else:
            model, make_batch = _call(name)
    devices = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    return model if devices <= {torch.device(device).type} else model.to(device), make_batch


def arguments(make_batch: MakeBatch, rank: int, step: int) -> dict[str, Any]:
    """One micro-batch; a WorkloadError if the user's function does not return a dict."""
    batch = make_batch(rank, step)
    if not isinstance(batch, dict):
        raise WorkloadError(f"make_batch({rank}, {step}) returned {type(batch).__name__}: return a dict of arguments")
    return batch


def loss_of(output: Any) -> torch.Tensor:
    """The loss in a model's output: the tensor itself or its `.loss`."""
    loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        seen = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(output).__name__
        raise WorkloadError(f"the model returned {seen}: return the loss (a scalar tensor) or an object with .loss")
    return loss


def _call(name: str) -> ModelAndData:
    path, function = _split(name)
    try:
        result = _function(path, function)()
    except WorkloadError:
        raise
    except Exception as error:
        raise WorkloadError(f"model {name!r}: {function}() raised {type(error).__name__}: {error}") from error
    seen = type(result).__name__
    if isinstance(result, tuple) and len(result) == 2:
        model, make_batch = result
        if isinstance(model, nn.Module) and callable(make_batch):
            return model, make_batch
        seen = f"({type(model).__name__}, {type(make_batch).__name__})"
    raise WorkloadError(f"model {name!r}: {function}() returned {seen}: return {SHAPE}")


def _function(path: Path, name: str) -> Callable[[], Any]:
    spec = importlib.util.spec_from_file_location(f"shardwise_compare_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise WorkloadError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look the module up there
    sys.path.insert(0, str(path.parent))  # as Python does for a script, so that files beside it can be imported
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise WorkloadError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    function: Callable[[], Any] | None = getattr(module, name, None)
    if not callable(function):
        raise WorkloadError(f"{path} has no function {name!r}")
    return function


def _split(name: str) -> tuple[Path, str]:
    path, _, function = name.rpartition(":")
    return Path(path).expanduser().absolute(), function if path else ""
