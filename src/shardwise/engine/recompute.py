"""Activation checkpointing by configuration: every block's forward is recomputed in its backward.

A single layer (an embedding, a head) is not: it would keep its input all the same. With a shelf, what is
kept until then rests on the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.engine.activations import ActivationStore
from shardwise.unit.unit import Unit


class Recompute:
    """Wraps the forward of each unit's modules, inside the hooks: the recomputation sees the gathered weights."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], shelf: ActivationStore | None = None) -> None:
        self._shelf = shelf
        self._wrapped: list[nn.Module] = []
        paths = dict.fromkeys(path for unit in units for path in (unit.spec.runs[:1] or ((),))[0])
        for module in (model.get_submodule(path) for path in paths if path):
            if any(True for _ in module.children()):
                module.forward = partial(_forward, module.forward, shelf)
                self._wrapped.append(module)

    def remove(self) -> None:
        for module in self._wrapped:
            del module.forward
        if self._shelf is not None:
            self._shelf.close()


def _forward(inner: Callable[..., Any], shelf: ActivationStore | None, *args: Any, **kwargs: Any) -> Any:
    with contextlib.nullcontext() if shelf is None else shelf.keeping():
        return checkpoint(inner, *args, use_reentrant=False, **kwargs)
