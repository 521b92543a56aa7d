"""What single clients need beyond DeepSpeed's API: Accelerate, Trainer, TRL, PEFT."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.errors import CompatibilityError


def check_client_counts_all_ranks() -> None:
    """Accelerate takes every process for the only one if it finds neither a GPU nor a backend that it was given: then
    all would train on the same samples and write the same files."""
    partial_state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    counted = getattr(partial_state, "_shared_state", {}).get("num_processes")
    started = torch.distributed.get_world_size()
    if counted is not None and counted != started:
        raise CompatibilityError(
            f"Accelerate counts {counted} processes, and {started} were started: without a GPU it is told to use the "
            "CPU, by TrainingArguments(use_cpu=True), or InitProcessGroupKwargs(backend='gloo') for an Accelerator"
        )


def unwrap_in_trainers(engine: Any) -> None:
    """Set `model_wrapped` to `model` in each Trainer that refers to a destroyed engine.

    `Trainer.train` has Accelerate destroy the engine of an earlier `train` or `evaluate`, but passes the model to
    Accelerate again only if `model_wrapped` is the model itself.
    """
    trainer_class = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if trainer_class is None:
        return
    for candidate in gc.get_objects():
        if issubclass(type(candidate), trainer_class) and getattr(candidate, "model_wrapped", None) is engine:
            candidate.model_wrapped = candidate.model


def saved_from_model(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that a client reads on one rank alone when it saves a state_dict that all ranks have gathered.

    PEFT writes what its prompt encoders compute, not their entries in the state_dict.
    """
    return list(encoders.parameters()) if (encoders := getattr(model, "prompt_encoder", None)) is not None else []


def saved_though_frozen(model: nn.Module) -> list[nn.Parameter]:
    """The frozen parameters that a client saves with adapters: PEFT writes the embeddings of a base whose vocabulary
    was resized, and those that have adapters."""
    found: list[nn.Parameter] = []
    for name in ("get_input_embeddings", "get_output_embeddings") if hasattr(model, "peft_config") else ():
        with contextlib.suppress(AttributeError, NotImplementedError):  # a model may have none
            found += getattr(model, name)().parameters()
    return found


def save_what_is_written(save: Callable[..., Any], was_elsewhere: Callable[[], bool], *args: Any, **named: Any) -> Any:
    """A model's `save_pretrained`, with None as the state_dict on ranks whose values another rank has gathered.

    Accelerate has all ranks call it so. What is not the main process would write nothing, but call `state_dict()`, in
    which all ranks take part.
    """
    if named.get("state_dict") is None and not named.get("is_main_process", True) and was_elsewhere():
        return None
    return save(*args, **named)


class DeepSpeedZeRoOffload:
    """What TRL looks for to generate without gathering layer by layer: it removes the hooks and puts them back.

    The engine's hooks stay: a forward on gathered parameters gathers nothing. The handles here stand for them.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self._register_deepspeed_module(module)

    def _register_deepspeed_module(self, module: nn.Module, *details: Any) -> None:
        self.forward_hooks.append(RemovableHandle(OrderedDict()))

    _register_hooks_recursively = _register_deepspeed_module
    """Its name up to DeepSpeed 0.16.3, which copies of TRL's functions call."""

    @contextlib.contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Within it there are none to see."""
        removed, self.forward_hooks = self.forward_hooks, []
        try:
            yield
        finally:
            self.forward_hooks = removed
