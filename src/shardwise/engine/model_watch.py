"""Notices at `step()` that the user has changed the model under its engine: new parameters, rebound or written ones.

An adapter added after `initialize`, a replaced head or resized embeddings bring parameters that the engine does not
own: nothing would ever update them. To walk through all parameters in every step would cost time. So the watch compares
the tables of all modules with what was in them before, object by object, and walks only if something was replaced.
That takes a millisecond for 2000 modules: it is done in the first steps, and then in every 16th. Weights in 16 bit that
were written in place (`param.data.add_(...)`) are found by comparing a few elements with the master copies.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from shardwise.errors import ModelChangedError
from shardwise.tensors import HostFlags
from shardwise.unit import Unit
from shardwise.unit.param_guard import PLAINLY

_FIRST, _EVERY = 4, 16  # how many steps are checked at first, and the interval after that


class ModelWatch:
    """Compares a model with what it was when its engine was made."""

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self._model = model
        self._units = units
        self._owned = {id(param) for unit in units for param in unit.params}
        self._tables: list[dict[str, Any]] = []
        self._seen: list[Any] = []
        self._checks = 0
        self._written: tuple[list[str], HostFlags] | None = None
        self._look()

    def check(self) -> None:
        """Refuse trainable parameters that the engine does not own, and parameters with storage of their own."""
        if self._checks < _FIRST or self._checks % _EVERY == 0:
            self.examine()
            self._compare()
        self._refuse_written()
        self._checks += 1  # not if it raised: the next step checks again

    def examine(self) -> None:
        """As `check`, in any step."""
        now = chain.from_iterable(map(dict.values, self._tables))
        if not all(map(operator.is_, now, self._seen)) or sum(map(len, self._tables)) != len(self._seen):
            self._check_owned()
            self._look()
        for unit in self._units:
            if (error := unit.weights.rebound_error()) is not None:
                raise error

    def _compare(self) -> None:
        flags = {unit.name: flag for unit in self._units if (flag := unit.weights.was_written()) is not None}
        if flags and self._written is None:
            self._written = list(flags), HostFlags(torch.stack(list(flags.values())))

    def _refuse_written(self) -> None:
        if self._written is None or not self._written[1].are_here:
            return
        (names, flags), self._written = self._written, None
        for name, is_written in zip(names, flags.wait(), strict=True):
            if is_written:
                raise ModelChangedError(
                    f"a parameter of {name} was written in place (such as `param.data.add_(...)`), and the update from "
                    "its fp32 master copy would undo that: write inside `with shardwise.gathered(params, write=True):`"
                )

    def _look(self) -> None:
        modules = list(self._model.modules())
        self._tables = [table for module in modules for table in (module._modules, module._parameters)]
        self._seen = list(chain.from_iterable(map(dict.values, self._tables)))

    def _check_owned(self) -> None:
        with PLAINLY():
            foreign = [
                name
                for name, param in self._model.named_parameters()
                if id(param) not in self._owned and param.requires_grad
            ]
        if foreign:
            more = f" and {len(foreign) - 1} more parameters are" if len(foreign) > 1 else " is"
            raise ModelChangedError(
                f"{foreign[0]!r}{more} trainable and not in the engine, which would never update them: add adapters, "
                "replace heads and resize embeddings before shardwise.initialize, and build the optimizer after it; "
                "copy.deepcopy(engine.module) gives a plain model to initialize again"
            )
