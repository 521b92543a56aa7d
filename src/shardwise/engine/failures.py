"""Failures of a pass: the other ranks are notified, and an out-of-memory error says which settings need less memory."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence

import torch

from shardwise.comm import Comm
from shardwise.config import Config
from shardwise.config.costs import resting, resting_bytes
from shardwise.config.presets import PRESETS
from shardwise.config.shape import NodeShape
from shardwise.memory import Ledger
from shardwise.sizes import format_bytes
from shardwise.unit import Unit


class PassFailures:
    """Handles the exceptions of an engine's passes."""

    def __init__(self, config: Config, units: Sequence[Unit], comm: Comm, ledger: Ledger) -> None:
        self._config = config
        self._units = units
        self._comm = comm
        self._ledger = ledger

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Tell the other ranks of an exception: they would otherwise wait in this pass forever.

        Where memory ran out, say what was held and what would hold less.
        """
        try:
            yield
        except BaseException as error:
            if isinstance(error, torch.OutOfMemoryError):
                explanation = explain_out_of_memory(error, self._config, self._units, self._ledger)
                error.args = (f"{error}\n{explanation}",)
            elif isinstance(error, RuntimeError) and (note := explain_mixed_dtypes(error, self._config)):
                error.add_note(note)
            # A forward on replicated weights sends nothing: one rank alone may fail and try again.
            if what != "forward" or self._config.placement.weights.sharding != "replicated":
                first_line = str(error).partition("\n")[0]
                self._comm.note(f"the {what} was broken off by {type(error).__name__}: {first_line}")
            if self._comm.watch is not None and isinstance(error, Exception):
                self._comm.watch.raise_reason(error)
            raise


def explain_mixed_dtypes(error: RuntimeError, config: Config) -> str | None:
    """What to add where torch refuses operands of several dtypes in a model that computes in 16 bit."""
    precision = config.precision
    if precision.compute == "fp32" or precision.autocast or not _MIXED.search(str(error)):
        return None
    return (
        f"shardwise: with precision.compute {precision.compute}, parameters and floating-point inputs are "
        f"{precision.compute}; buffers and tensors that the model makes keep their dtype. Cast them in the forward "
        "(x.to(self.weight.dtype)), convert the buffers before shardwise.initialize, or set precision.autocast: true"
    )


_MIXED = re.compile(r"same dtype|expected scalar type|dtypes? (do not|don't) match", re.IGNORECASE)


@contextlib.contextmanager
def all_or_nothing(drop: Callable[[], None]) -> Iterator[None]:
    """Around an update. If it raises, some of the gradients are used up: `drop` is called, so that the others are not
    applied alone."""
    try:
        yield
    except BaseException as error:
        error.add_note("shardwise: step() was broken off, and some weights may be updated: load the last checkpoint")
        drop()
        raise


_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")


def explain_out_of_memory(error: BaseException, config: Config, units: Sequence[Unit], ledger: Ledger) -> str:
    """The lines to add to torch's message: what was held, what was asked for, and what would hold less."""
    asked = _ASKED.search(str(error))
    held = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in sorted(ledger.by_kind().items())) or "nothing"
    lines = [
        f"shardwise held {format_bytes(ledger.total_bytes)} of this rank's memory ({held}) when torch "
        + (f"asked for {asked[1]}" if asked else "asked for more")
        + "; the rest is activations and what else your program keeps.",
        "What would hold less:",
    ]
    return "\n".join([*lines, *(f"  - {line}" for line in _remedies(config, units))])


def _remedies(config: Config, units: Sequence[Unit]) -> Iterator[str]:
    parameters, shape = sum(unit.layout.numel for unit in units), units[0].comm.shape if units else NodeShape(1, 1)
    now = _resting_bytes(config, parameters, shape)
    least = now
    for name, placement in PRESETS.items():
        other = _resting_bytes(config.model_copy(update={"placement": placement}), parameters, shape)
        if other < least:
            least = other
            yield f"preset {name}: {format_bytes(other)} at rest on the device, where it is {format_bytes(now)} now"
    if config.precision.weights_dtype == "fp32":
        yield "precision.compute bf16: weights, gradients and activations take half the bytes while they are used"
    if not config.checkpointing.enabled:
        yield "checkpointing.enabled true: the activations of one block at a time, instead of all"
    yield "a smaller micro-batch, and batch.accumulation higher to make up for it: activations shrink with it"
    if config.placement.weights.sharding == "sharded" and config.runtime.prefetch:
        largest = max((unit.weights.full_bytes for unit in units), default=0)
        yield f"runtime.prefetch 0: one unit less is gathered at a time (up to {format_bytes(largest)})"
    yield f"more ranks: what is sharded is cut by their number, now {shape.world_size}"


def _resting_bytes(config: Config, parameters: int, shape: NodeShape) -> int:
    return round(resting_bytes(resting(config), parameters, shape, "device"))
