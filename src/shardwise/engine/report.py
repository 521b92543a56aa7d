"""What a run held, sent and waited for."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.comm import Comm
from shardwise.memory import Ledger
from shardwise.offload.streams import Streams
from shardwise.profiling import Clock

_LOG = logging.getLogger("shardwise")


@dataclass(frozen=True)
class Report:
    """One rank's account. Printing it gives a short table.

    `steps` counts those before a resume, `steps_here` those of this process, to which bytes and seconds belong. What
    evaluation passes sent, moved and took is part of the totals and also stands alone. `axis_bytes` is what was sent
    within the node (inner) and out of it (outer), without control messages.
    `peak_bytes` is the engine's own; `measured_peak_bytes` the allocator's, activations included, on CUDA; predicted
    is what was passed to `engine.expect`.
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


def log_step(steps: int, optimizer: torch.optim.Optimizer, grad_norm: torch.Tensor) -> None:
    """Log a line about the last step. Waits for the device."""
    rates = ", ".join(f"{group['lr']:.3g}" for group in optimizer.param_groups)
    _LOG.info("step %d, learning rate %s, gradient norm %.4g", steps, rates, grad_norm.item())
