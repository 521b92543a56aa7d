"""What a run held, sent and waited for; and what to say when the device runs out of memory."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.comm import Comm
from shardwise.config import Config
from shardwise.config.costs import resting, resting_bytes
from shardwise.config.presets import PRESETS
from shardwise.config.shape import NodeShape
from shardwise.memory import Ledger
from shardwise.offload.streams import Streams
from shardwise.profiling import Clock
from shardwise.sizes import format_bytes
from shardwise.unit import Unit


@dataclass(frozen=True)
class Report:
    """One rank's account. Printing it gives a short table.

    `steps` counts those before a resume, `steps_here` those of this process, to which bytes and seconds belong. What
    evaluation passes sent, moved and took is part of the totals and also stands alone. `axis_bytes` is what was sent
    within the node (inner) and out of it (outer), without control messages.
    `peak_bytes` is the engine's own; `measured_peak_bytes` the allocator's, activations included, on CUDA; predicted
    is what `engine.expect` was told.
    """

    steps: int
    memory_bytes: dict[str, int]
    tier_bytes: dict[str, int]
    tier_peak_bytes: dict[str, int]
    peak_bytes: int
    peak_memory_bytes: dict[str, int]
    sent_bytes: dict[str, int]
    moved_bytes: dict[str, int]
    phase_s: dict[str, float]
    steps_here: int = 0
    axis_bytes: dict[str, int] = field(default_factory=dict)
    evaluation_sent_bytes: dict[str, int] = field(default_factory=dict)
    evaluation_moved_bytes: dict[str, int] = field(default_factory=dict)
    evaluation_phase_s: dict[str, float] = field(default_factory=dict)
    measured_peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None

    @classmethod
    def of(
        cls,
        ledger: Ledger,
        account: StepAccount,
        device: torch.device,
        steps: int,
        predicted_bytes: int | None = None,
    ) -> Report:
        sent, moved, seconds = account.totals
        evaluation_sent, evaluation_moved, evaluation_s = account.in_evaluation
        return cls(
            steps=steps,
            memory_bytes=ledger.by_kind(),
            tier_bytes=ledger.by_tier(),
            tier_peak_bytes=ledger.by_tier(at_peak=True),
            peak_bytes=ledger.peak_bytes,
            peak_memory_bytes=ledger.by_kind(at_peak=True),
            sent_bytes=dict(sent),
            moved_bytes=dict(moved),
            phase_s=dict(seconds),
            steps_here=account.steps,
            axis_bytes=dict(account.axis_bytes),
            evaluation_sent_bytes=dict(evaluation_sent),
            evaluation_moved_bytes=dict(evaluation_moved),
            evaluation_phase_s=dict(evaluation_s),
            measured_peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            predicted_peak_bytes=predicted_bytes,
        )

    def __str__(self) -> str:
        here = f", {self.steps_here} of them in this process" if self.steps_here != self.steps else ""
        lines = [
            f"shardwise, this rank, after {self.steps} step(s){here}",
            f"{'memory held':<26}{'now':>14}  {'peak':>14}",
        ]
        for kind in sorted(self.memory_bytes.keys() | self.peak_memory_bytes.keys()):
            now, peak = self.memory_bytes.get(kind, 0), self.peak_memory_bytes.get(kind, 0)
            lines.append(f"  {kind:<24}{_mib(now)}  {_mib(peak)}")
        predicted, measured = self.predicted_peak_bytes, self.measured_peak_bytes
        lines.append(
            f"  {'everything, predicted':<24}{'':>14}  {_mib(predicted) if predicted is not None else _UNKNOWN}"
        )
        if measured is not None:
            lines.append(f"  {'everything, measured':<24}{'':>14}  {_mib(measured)}")
        lines += ["sent per step", *self._per_step(self.sent_bytes, self.evaluation_sent_bytes, _mib)]
        if "outer" in self.axis_bytes:
            names = {"inner": "within the node", "outer": "out of the node"}
            sizes = {names[axis]: size for axis, size in self.axis_bytes.items()}
            lines += ["sent per step, evaluation included", *self._per_step(sizes, {}, _mib)]
        if self.moved_bytes:
            lines += ["moved per step", *self._per_step(self.moved_bytes, self.evaluation_moved_bytes, _mib)]
        lines += ["host time per step", *self._per_step(self.phase_s, self.evaluation_phase_s, _ms)]
        evaluated = {f"{kind}, sent": _mib(size) for kind, size in sorted(self.evaluation_sent_bytes.items())}
        evaluated |= {f"{way}, moved": _mib(size) for way, size in sorted(self.evaluation_moved_bytes.items())}
        evaluated |= {name: _ms(seconds) for name, seconds in sorted(self.evaluation_phase_s.items())}
        if evaluated:
            lines += ["in all evaluation passes", *(f"  {name:<24}{text}" for name, text in evaluated.items())]
        return "\n".join(lines)

    def _per_step(
        self, totals: Mapping[str, float], evaluation: Mapping[str, float], text: Callable[[float], str]
    ) -> Iterator[str]:
        """A line for each total of this process's steps, divided by their number."""
        for name, total in sorted(totals.items()):
            yield f"  {name:<24}{text((total - evaluation.get(name, 0)) / max(1, self.steps_here))}"


class StepAccount:
    """The steps of this process, what it sent, moved and waited for, and how much of that evaluation passes did."""

    def __init__(self, comm: Comm, streams: Streams, clock: Clock) -> None:
        self.steps = 0
        self.axis_bytes = comm.axis_bytes
        self.totals: tuple[Mapping[str, Any], ...] = (comm.sent_bytes, streams.moved_bytes, clock.seconds)
        self.in_evaluation: tuple[dict[str, Any], ...] = ({}, {}, {})

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around an evaluation pass."""
        before = [dict(total) for total in self.totals]
        try:
            yield
        finally:
            for total, start, spent in zip(self.totals, before, self.in_evaluation, strict=True):
                for name, now in total.items():
                    if now != start.get(name, 0):
                        spent[name] = spent.get(name, 0) + now - start.get(name, 0)


_UNKNOWN = "unknown: call engine.expect(shardwise.foresee(build, config).peak_bytes)"


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:>10.2f} MiB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:>11.2f} ms"


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
