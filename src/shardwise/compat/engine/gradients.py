"""What is done with gradients around a backward: their change on entering a model, and a check for missing ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import nn

from shardwise.tensors import map_tensors


def with_gradients_changed(outputs: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same outputs. A gradient that reaches one of their tensors is changed once on its way into the model.

    The tensors are views of the model's own: a loss that the model computes from logits, and returns beside them, has
    its gradient changed where it enters, and not again at the logits.
    """

    def viewed(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.grad_fn is None:
            return tensor
        view = tensor.view_as(tensor)
        view.register_hook(change)
        return view

    if isinstance(outputs, MutableMapping) and type(outputs) is not dict:  # such as ModelOutput of transformers
        copied = copy.copy(outputs)
        for key, value in outputs.items():
            copied[key] = map_tensors(value, viewed)
        return copied
    return map_tensors(outputs, viewed)


class UnusedParameters:
    """Notes which trainable parameters get gradients; `check` refuses a step in which some got none."""

    def __init__(self, model: nn.Module) -> None:
        self._missing: dict[str, None] = {}
        self._names = [name for name, param in model.named_parameters() if param.requires_grad]
        for name in self._names:
            model.get_parameter(name).register_hook(lambda grad, name=name: self._missing.pop(name, None))
        self._begin()

    @classmethod
    def of(cls, model: nn.Module, settings: dict[str, Any], stage: int) -> UnusedParameters | None:
        """A check where the settings ask for one; under stage 2 alone, as in DeepSpeed."""
        zero = settings.get("zero_optimization")
        is_asked = isinstance(zero, dict) and zero.get("ignore_unused_parameters") is False
        return cls(model) if is_asked and stage == 2 else None

    def check(self) -> None:
        """Before the update of a step."""
        missing = list(self._missing)
        self._begin()
        if missing:
            raise AssertionError(
                f"{len(missing)} parameters got no gradient, the first is {missing[0]!r}: set "
                "zero_optimization.ignore_unused_parameters to true, or leave it out"
            )

    def _begin(self) -> None:
        self._missing = dict.fromkeys(self._names)
