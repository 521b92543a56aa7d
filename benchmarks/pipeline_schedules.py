"""Every schedule of torch's x every stage of ZeRO, on two stages or pairs of stages x two data-parallel ranks, fp32:
how far the weights are from those of one process, and how far the planned peaks are from the measured ones.

    torchrun --nproc-per-node 4 benchmarks/pipeline_schedules.py [--only weights|peaks]

Weights: after two steps of SGD, the largest relative difference of a parameter's norm. Peaks: of a small GPT under
AdamW, bytes of live tensor storage by the observer, the median of three steps after the second, of both places in the
pipeline (the mean of their two ranks), beside what `shardwise.foresee_pipeline` says. Rank 0 prints one JSON object.
"""

import argparse
import gc
import json
import os
import statistics
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import shardwise
from shardwise.dry_run.pipeline import SCHEDULES
from shardwise.models.built_in import GPT, tokens
from shardwise.observe import StorageObserver

PRESETS = ("zero0", "zero1", "zero2", "zero3")
CASES = [(schedule, preset) for schedule in SCHEDULES for preset in PRESETS]
PP, DP, MICRO_BATCHES = 2, 2, 4


# Weights

WIDTH, BLOCKS, BATCH, STEPS = 16, 4, 8, 2


def make_blocks() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = nn.Sequential(
        *(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
            for _ in range(BLOCKS)
        )
    )
    for param in blocks.parameters():
        nn.init.normal_(param.data, std=0.5)
    return blocks


def batch_of(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, WIDTH, generator=generator)


def sgd(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)


def plain_weights() -> dict[str, torch.Tensor]:
    model = make_blocks()
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for replica in range(DP):
            inputs, targets = batch_of(step, replica)
            (F.mse_loss(model(inputs), targets) / DP).backward()
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def difference(mesh: Any, expected: dict[str, torch.Tensor], schedule: str, preset: str) -> float:
    pipe = shardwise.pipeline(
        make_blocks(), mesh, sgd, preset, schedule=schedule, micro_batches=MICRO_BATCHES, loss_fn=F.mse_loss
    )
    for step in range(STEPS):
        pipe.train_step(batch_of(step, mesh["dp"].get_local_rank()))
    values = {name: pipe.full_param(name) for name in expected}
    found = [((v - expected[n]).norm() / expected[n].norm()).item() for n, v in values.items() if v is not None]
    pipe.destroy()
    return max(from_everyone(max(found)))


# Peaks


def build_gpt() -> Any:
    return GPT(hidden=128, layers=8, heads=4, vocabulary=128, length=64), tokens(2, 64, 128)


def planned_peaks(schedule: str, preset: str) -> list[int]:
    """The peak of each place in the pipeline, by dry runs."""
    shape = {"pp": PP, "micro_batches": MICRO_BATCHES, "device": "cpu"}
    found = shardwise.foresee_pipeline(build_gpt, preset, PP * DP, schedule=schedule, **shape)
    return [rank.peak_bytes for rank in found.ranks]


def measured_peaks(mesh: Any, schedule: str, preset: str) -> list[float]:
    torch.manual_seed(0)
    model, make_batch = build_gpt()
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    pipe = shardwise.pipeline(model, mesh, adamw, preset, schedule=schedule, micro_batches=MICRO_BATCHES)
    del model
    peaks = []
    for number in range(5):
        parts = [make_batch(0, number) for _ in range(MICRO_BATCHES)]
        batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        gc.collect()
        with StorageObserver() as memory:
            pipe.train_step(batch)
        peaks.append(memory.peak_bytes)
    pipe.destroy()
    everyone = from_everyone(statistics.median(peaks[2:]))
    return [statistics.mean(everyone[place * DP : (place + 1) * DP]) for place in range(PP)]


def beside(planned: list[int], measured: list[float]) -> dict[str, Any]:
    off = [round(plan / peak - 1, 5) for plan, peak in zip(planned, measured, strict=True)]
    return {"planned_bytes": planned, "measured_bytes": list(map(round, measured)), "off": off}


def from_everyone(value: Any) -> list[Any]:
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def as_table(values: list[Any]) -> dict[str, dict[str, Any]]:
    rows = dict(zip(CASES, values, strict=True))
    return {schedule: {preset: rows[schedule, preset] for preset in PRESETS} for schedule in SCHEDULES}


def weights_table(mesh: Any) -> dict[str, Any]:
    expected = plain_weights()
    return {"largest relative difference": as_table([difference(mesh, expected, *case) for case in CASES])}


def peaks_table(mesh: Any, planned: dict[int, list[int]]) -> dict[str, Any]:
    plans = {number: peaks for each in from_everyone(planned) for number, peaks in each.items()}
    rows = [beside(plans[number], measured_peaks(mesh, *case)) for number, case in enumerate(CASES)]
    off = [abs(each) for row in rows for each in row["off"]]
    accuracy = {"off at worst": max(off), "off at the median": statistics.median(off)}
    return {"peaks of the first and the last place": {**accuracy, **as_table(rows)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("weights", "peaks"))
    only = parser.parse_args().only
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    # Dry runs have a group of their own, and each rank does some of them.
    own = range(rank, len(CASES), PP * DP) if only != "weights" else ()
    planned = {number: planned_peaks(*CASES[number]) for number in own}
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (PP, DP), mesh_dim_names=("pp", "dp"))
    found = weights_table(mesh) if only != "peaks" else {}
    found |= peaks_table(mesh, planned) if only != "weights" else {}
    if rank == 0:
        facts = {"torch": torch.__version__, "backend": "gloo", "pp": PP, "dp": DP, "micro_batches": MICRO_BATCHES}
        print(json.dumps({**facts, **found}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
