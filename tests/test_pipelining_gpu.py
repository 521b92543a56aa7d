"""Pipelines x ZeRO over NCCL, with four ranks on one GPU: every schedule, all stages, streams and checkpoints."""

import pytest
import torch

from support.nccl import run_script

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LIMIT_S = 400

SCRIPT = """
import os, sys
rank = int(os.environ["RANK"])
import torch, torch.distributed as dist
torch.use_deterministic_algorithms(True)
torch.backends.cuda.matmul.allow_tf32 = False
torch.cuda.set_device(0)
dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.FileStore(sys.argv[1] + "/store", 4), rank=rank, world_size=4)
from torch.distributed.device_mesh import init_device_mesh
import shardwise
from shardwise.models.built_in import GPT

mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("pp", "dp"))

def gpt():
    torch.manual_seed(0)
    return GPT(hidden=64, layers=4, heads=4, vocabulary=128, length=32, tied=True).cuda()

def sgd(params):
    return torch.optim.SGD(params, lr=0.1)

def batch(step, dp_rank):
    return torch.randint(128, (8, 33), generator=torch.Generator().manual_seed(100 * step + dp_rank)).cuda()

plain, norms = gpt(), []
optimizer = sgd(plain.parameters())
for step in range(3):
    optimizer.zero_grad()
    (sum(plain(batch(step, dp_rank)) for dp_rank in range(2)) / 2).backward()
    norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item())
    optimizer.step()
expected = dict(plain.named_parameters(remove_duplicate=False))

runs = [(schedule, preset) for schedule in
        ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
        for preset in ("zero0", "zero1", "zero2", "zero3")] + [("1F1B", "zero3_offload")]
for schedule, preset in runs:
    config = {"preset": preset, "gradients": {"clip_norm": 0.5}}
    pipe = shardwise.pipeline(gpt(), mesh, sgd, config, schedule=schedule, micro_batches=4)
    for step in range(3):
        pipe.train_step(batch(step, mesh["dp"].get_local_rank()))
        assert abs(pipe.grad_norm.item() - norms[step]) < 1e-5 * norms[step], (schedule, preset, step)
    got = {name: pipe.full_param(name) for name in expected}
    for name, value in got.items():
        assert value is None or (value - expected[name]).abs().max() < 1e-5, (schedule, preset, name)
    worst = max(((value - expected[name]).abs().max() / expected[name].abs().max()).item()
                for name, value in got.items() if value is not None)
    if (schedule, preset) == ("ZBVZeroBubble", "zero3"):
        pipe.save(sys.argv[1] + "/checkpoints")
        other = shardwise.initialize(gpt(), sgd, "zero2")
        other.load(sys.argv[1] + "/checkpoints")
        loaded = {name: other.full_param(name) for name in got if name != "head.weight"}  # on all ranks, tied ones once
        for name, value in loaded.items():
            assert got[name] is None or torch.equal(value, got[name]), name
        other.destroy()
    pipe.destroy()
    print("RAN", schedule, preset, f"{worst:.1e}", flush=True)
torch.cuda.synchronize()
os._exit(0)
"""


def test_every_schedule_and_stage_trains_as_one_process_does(tmp_path):
    run_script(SCRIPT, tmp_path, 4, LIMIT_S)
