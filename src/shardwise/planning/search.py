"""The search: which preset, micro-batch, accumulation and recomputation is fastest among those that fit.

Ranked by how much a sample costs, without a clock: arithmetic in units of one forward and backward (recomputing adds a
third), and bytes sent per sample, which larger micro-batches spread over more samples. Seconds are not printed: they
depend on kernels and links that nobody has measured here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.console import RenderableType
from rich.table import Table

from shardwise.planning.arithmetic import wire_elements
from shardwise.planning.estimate import estimate
from shardwise.planning.fit import judge
from shardwise.planning.hardware import Hardware
from shardwise.planning.recommend import ORDER
from shardwise.planning.workload import Model, Workload

MOST = 64
RECOMPUTE = 4 / 3


@dataclass(frozen=True)
class Candidate:
    """A configuration that fits."""

    preset: str
    micro_batch: int
    accumulation: int
    checkpointing: bool
    peak_bytes: int
    sent_bytes_per_sample: float
    condition: str = ""

    @property
    def rank(self) -> tuple[int, float, float]:
        """Less is faster: tiers first, then arithmetic, then bytes."""
        tier = 2 if "nvme" in self.preset else 1 if "offload" in self.preset else 0
        return tier, RECOMPUTE if self.checkpointing else 1.0, self.sent_bytes_per_sample


def search(model: Model, workload: Workload, hardware: Hardware, count: int = 5) -> list[Candidate]:
    """The fastest that fit, best first, with the same number of samples per step as `workload`."""
    samples = workload.micro_batch * workload.accumulation
    micro_batches = [size for size in range(1, min(samples, MOST) + 1) if samples % size == 0]
    found = [
        candidate
        for preset in ORDER
        for micro_batch in micro_batches
        for checkpointing in (False, True)
        if (candidate := _candidate(preset, micro_batch, samples, checkpointing, model, workload, hardware))
    ]
    return sorted(found, key=lambda candidate: (*candidate.rank, candidate.peak_bytes))[:count]


def _candidate(
    preset: str, micro_batch: int, samples: int, checkpointing: bool, model: Model, workload: Workload, on: Hardware
) -> Candidate | None:
    accumulation = samples // micro_batch
    wanted = replace(workload, micro_batch=micro_batch, accumulation=accumulation, checkpointing=checkpointing)
    config = wanted.config(preset)
    estimated = estimate(model, wanted, config, on.gpus)
    peak = estimated.peak_bytes + on.reserved_bytes
    fit = judge(config, peak, estimated.tiers, on)
    if not fit.fits:
        return None
    item = 4 if workload.precision == "fp32" else 2
    sent = wire_elements(preset, model.trainable, model.frozen, on.gpus, accumulation) * item
    return Candidate(preset, micro_batch, accumulation, checkpointing, peak, sent / samples, fit.condition)


def render(candidates: list[Candidate]) -> RenderableType:
    """The candidates, best first."""
    table = Table(
        box=None, padding=(0, 2, 0, 0), pad_edge=False, title="\nFastest that fit, best first", title_justify="left"
    )
    for name in ("", "preset", "micro-batch", "K", "recompute", "peak GB", "sent GB a sample", ""):
        table.add_column(name, justify="left" if name == "preset" else "right")
    for number, each in enumerate(candidates, start=1):
        table.add_row(
            str(number),
            each.preset,
            str(each.micro_batch),
            str(each.accumulation),
            "yes" if each.checkpointing else "no",
            f"{each.peak_bytes / 1e9:.1f}",
            f"{each.sent_bytes_per_sample / 1e9:.3g}",
            each.condition,
        )
    return table if candidates else "Nothing fits: no preset, micro-batch or recomputation."
