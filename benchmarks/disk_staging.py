"""The share of a disk's bandwidth that staging reaches: steps that read, verify and rewrite all states, no device.

    python benchmarks/disk_staging.py --folder /nvme --gib 4

It runs everything but the copies to the device and the update itself: read-ahead, checksums, threads. The raw figures
are measured in the same run, before and after (see `disk_probe`).
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator

import torch
from disk_probe import probe, yardstick_gbs

from shardwise.config.sections import Offload
from shardwise.machine import env
from shardwise.memory.ledger import Ledger
from shardwise.offload.pinned import Chunk, HostMemory
from shardwise.offload.staging import Staging
from shardwise.offload.streams import PAST
from shardwise.partition.layout import Span

UNITS = 16


class Unit:
    """A unit's states, and their transfer in a step."""

    def __init__(self, staging: Staging, numel: int) -> None:
        self.states = self
        self._chunks = staging.allocate([Span(0, numel)], torch.float32, is_weights=False)

    def chunks(self) -> Iterator[Chunk]:
        return iter(self._chunks)


def step(staging: Staging, units: list[Unit]) -> float:
    begun = time.perf_counter()
    for unit in units:
        staging.begin(unit)
        for chunk in unit.chunks():
            staging.incoming.give(staging.fetch(chunk), PAST)
            staging.send(chunk, staging.outgoing.take(), PAST)
        staging.end()
    staging.begin_step()
    return time.perf_counter() - begun


def measure(folder: str, gib: float, steps: int) -> dict[str, object]:
    size = int(gib * 2**30)
    before = probe(folder, size)
    staging = Staging(Ledger(), Offload(nvme_path=folder), HostMemory(), 64 << 20, size)
    staging.reserve(0, size)
    units = [Unit(staging, size // UNITS // 4) for _ in range(UNITS)]
    for unit in units:
        for chunk in unit.chunks():
            staging.send(chunk, staging.outgoing.take(), PAST)
    for _ in range(2):
        step(staging, units)
    seconds = [step(staging, units) for _ in range(steps)]
    staging.close()
    after = probe(folder, size)
    raw = statistics.mean(yardstick_gbs(rates, size, size) for rates in (before, after))
    reached = 2 * size / statistics.median(seconds) / 1e9
    return {
        "gib": gib,
        "raw_gbs": [{way: round(rate, 3) for way, rate in rates.items()} for rates in (before, after)],
        "step_s": [round(each, 3) for each in seconds],
        "disk_gbs": round(reached, 3),
        "of_raw": round(reached / raw, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    print(json.dumps({**env.made(), **measure(args.folder, args.gib, args.steps)}, indent=1))


if __name__ == "__main__":
    main()
