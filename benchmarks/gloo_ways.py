"""An exchange between two ranks over Gloo on the CPU, beside computation: over one connection, and over one each way.

    python benchmarks/gloo_ways.py

Both ranks send and receive at once, as gathers and reductions do, while they multiply matrices. Ways take turns, and
the median counts. Writes results/DATE-gloo-ways.json.
"""

import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from shardwise.machine import env

RESULTS = Path(__file__).parent / "results"
NUMEL, EXCHANGES, ROUNDS = 1_600_000, 40, 12

Ways = tuple[Any, Any]


def exchange(ways: Ways, sent: torch.Tensor, received: torch.Tensor, tag: int) -> list[Any]:
    """Rank 0 sends over the first of the ways, rank 1 over the second."""
    rank = dist.get_rank()
    return [
        dist.irecv(received, group=ways[1 - rank], group_src=1 - rank, tag=tag),
        dist.isend(sent, group=ways[rank], group_dst=1 - rank, tag=tag),
    ]


def turn(issue: Callable[[int], list[Any]], first_tag: int) -> tuple[float, float]:
    """Milliseconds and CPU milliseconds of one exchange."""
    matrix = torch.randn(256, 256)
    dist.barrier()
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for number in range(EXCHANGES):
        works = issue(first_tag + number)
        for _ in range(12):
            matrix @ matrix
        for work in works:
            work.wait()
    dist.barrier()
    taken, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return taken / EXCHANGES * 1e3, cpu / EXCHANGES * 1e3


def measure(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    one, other = dist.new_group(), dist.new_group()
    sent, received = torch.ones(NUMEL), torch.empty(NUMEL)
    kinds: dict[str, Ways | None] = {"none": None, "one connection": (one, one), "one each way": (one, other)}
    seen: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    tag = 0
    for _ in range(ROUNDS + 1):
        for kind, ways in kinds.items():
            tag += EXCHANGES
            seen[kind].append(
                turn(lambda number, ways=ways: exchange(ways, sent, received, number) if ways else [], tag)
            )
    if rank == 0:
        Path(folder, "seen.json").write_text(json.dumps({kind: values[1:] for kind, values in seen.items()}))
    dist.barrier()
    os._exit(0)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (folder,), nprocs=2)
        seen = json.loads(Path(folder, "seen.json").read_text())
    rows = [
        {
            "over": kind,
            "ms": round(statistics.median(ms for ms, _ in values), 2),
            "cpu_ms": round(statistics.median(cpu for _, cpu in values), 2),
            "ms_of_rounds": [round(ms, 2) for ms, _ in values],
        }
        for kind, values in seen.items()
    ]
    for row in rows:
        print(row)
    made = env.made()
    result = {**made, "versions": env.versions(), "bytes_each_way": NUMEL * 4, "rows": rows}
    (RESULTS / f"{made['date']}-gloo-ways.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
