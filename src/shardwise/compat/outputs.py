"""What a model returns, with something done to the gradients that come back through it."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from typing import Any

import torch

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
