"""What a run held, sent and waited for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.comm.comm import Comm
from shardwise.memory.ledger import Ledger
from shardwise.offload.streams import Streams
from shardwise.profiling import Clock


@dataclass(frozen=True)
class Report:
    """One rank's account. Printing it gives a short table.

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
    measured_peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None

    @classmethod
    def of(
        cls,
        ledger: Ledger,
        comm: Comm,
        streams: Streams,
        clock: Clock,
        steps: int,
        predicted_bytes: int | None = None,
    ) -> Report:
        return cls(
            steps=steps,
            memory_bytes=ledger.by_kind(),
            tier_bytes=ledger.by_tier(),
            tier_peak_bytes=ledger.by_tier(at_peak=True),
            peak_bytes=ledger.peak_bytes,
            peak_memory_bytes=ledger.by_kind(at_peak=True),
            sent_bytes=dict(comm.sent_bytes),
            moved_bytes=dict(streams.moved_bytes),
            phase_s=dict(clock.seconds),
            measured_peak_bytes=torch.cuda.max_memory_allocated(comm.device) if comm.device.type == "cuda" else None,
            predicted_peak_bytes=predicted_bytes,
        )

    def __str__(self) -> str:
        steps = max(1, self.steps)
        lines = [f"shardwise, this rank, after {self.steps} step(s)", f"{'memory held':<26}{'now':>14}  {'peak':>14}"]
        for kind in sorted(self.memory_bytes.keys() | self.peak_memory_bytes.keys()):
            now, peak = self.memory_bytes.get(kind, 0), self.peak_memory_bytes.get(kind, 0)
            lines.append(f"  {kind:<24}{_mib(now)}  {_mib(peak)}")
        predicted, measured = self.predicted_peak_bytes, self.measured_peak_bytes
        lines.append(
            f"  {'everything, predicted':<24}{'':>14}  {_mib(predicted) if predicted is not None else _UNTOLD}"
        )
        if measured is not None:
            lines.append(f"  {'everything, measured':<24}{'':>14}  {_mib(measured)}")
        lines += ["sent per step"]
        lines += [f"  {kind:<24}{_mib(sent / steps)}" for kind, sent in sorted(self.sent_bytes.items())]
        if self.moved_bytes:
            lines += ["moved per step"]
            lines += [f"  {way:<24}{_mib(moved / steps)}" for way, moved in sorted(self.moved_bytes.items())]
        lines += ["host time per step"]
        lines += [f"  {name:<24}{seconds / steps * 1e3:>11.2f} ms" for name, seconds in sorted(self.phase_s.items())]
        return "\n".join(lines)


_UNTOLD = "not told: engine.expect(shardwise.foresee(build, config).peak_bytes)"


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:>10.2f} MiB"
