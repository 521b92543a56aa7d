"""How far weights are from those of one process after two steps of SGD, for every schedule and stage of ZeRO.

torchrun --nproc-per-node 4 benchmarks/pipeline_schedules.py

Two stages or pairs of stages x two data-parallel ranks, fp32; the largest relative difference of a parameter's norm.
Rank 0 prints one JSON object.
"""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import shardwise
from shardwise.planning.pp_axis import SCHEDULES

WIDTH, BLOCKS, MICRO_BATCHES, BATCH, STEPS = 16, 4, 4, 8, 2


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
        for replica in range(2):
            inputs, targets = batch_of(step, replica)
            (F.mse_loss(model(inputs), targets) / 2).backward()
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def difference(mesh: object, schedule: str, preset: str, expected: dict[str, torch.Tensor]) -> float:
    pipe = shardwise.pipeline(
        make_blocks(), mesh, sgd, preset, schedule=schedule, micro_batches=MICRO_BATCHES, loss_fn=F.mse_loss
    )
    for step in range(STEPS):
        pipe.train_step(batch_of(step, mesh["dp"].get_local_rank()))
    values = {name: pipe.full_param(name) for name in expected}
    found = [((v - expected[n]).norm() / expected[n].norm()).item() for n, v in values.items() if v is not None]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, max(found))
    pipe.destroy()
    return max(everyone)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    expected = plain_weights()
    presets = ("zero0", "zero1", "zero2", "zero3")
    table = {name: {preset: difference(mesh, name, preset, expected) for preset in presets} for name in SCHEDULES}
    if dist.get_rank() == 0:
        facts = {"torch": torch.__version__, "backend": "gloo", "pp": 2, "dp": 2, "micro_batches": MICRO_BATCHES}
        print(json.dumps({**facts, "largest relative difference": table}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
