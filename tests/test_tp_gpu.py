"""Tensor parallelism x ZeRO over NCCL, with four ranks on one GPU: bits, checkpoints, and peaks as foreseen."""

import json

import pytest
import torch

import shardwise
from shardwise.models.built_in import GPT, tokens
from support.nccl import run_script

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LIMIT_S = 300

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
from shardwise.models.tensor_parallel import tensor_parallel

mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))

def gpt():
    torch.manual_seed(0)
    return GPT(hidden=64, layers=3, heads=4, vocabulary=128, length=32, fused=False).cuda()

def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)

def batch(step, dp_rank):
    return torch.randint(128, (4, 33), generator=torch.Generator().manual_seed(100 * step + dp_rank)).cuda()

plain, norms = gpt(), []
optimizer = sgd(plain.parameters())
for step in range(4):
    optimizer.zero_grad()
    (sum(plain(batch(step, dp_rank)) for dp_rank in range(2)) / 2).backward()
    norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item())
    optimizer.step()
expected = dict(plain.named_parameters())

for compute in ("fp32", "bf16"):
    first = None
    for preset in ("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"):
        model = tensor_parallel(gpt(), mesh["tp"])
        config = {"preset": preset, "gradients": {"clip_norm": 0.5}, "precision": {"compute": compute}}
        engine = shardwise.initialize(model, sgd(model.parameters()), config, mesh=mesh["dp"])
        for step in range(4):
            engine.backward(engine(batch(step, mesh["dp"].get_local_rank())))
            engine.step()
            if compute == "fp32":
                assert abs(engine.grad_norm.item() - norms[step]) < 1e-5 * norms[step], (preset, step)
        got = {name: engine.full_param(name) for name in expected}
        first = first or got
        for name, value in got.items():
            assert torch.equal(first[name], value), (compute, preset, name)
            if compute == "fp32":
                assert (value - expected[name]).abs().max() < 1e-5, (preset, name)
        if compute == "fp32" and preset == "zero3":
            engine.save(sys.argv[1] + "/checkpoints")
            other = shardwise.initialize(gpt(), sgd, "zero2")
            other.load(sys.argv[1] + "/checkpoints")
            assert all(torch.equal(other.full_param(name), value) for name, value in got.items())
            other.destroy()
        engine.destroy()
print("DONE", flush=True)
torch.cuda.synchronize()
os._exit(0)
"""


def test_stages_and_tiers_have_the_same_bits_and_those_of_one_process_to_rounding(tmp_path):
    run_script(SCRIPT, tmp_path, 4, LIMIT_S)


PRESETS = ("zero1", "zero2", "zero3")
SIZES = {"hidden": 1024, "layers": 4, "heads": 8, "vocabulary": 4000, "length": 256}
BATCH = 8

PEAKS = f"""
import gc, json, os, sys
rank = int(os.environ["RANK"])
import torch, torch.distributed as dist
torch.cuda.set_device(0)
dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.FileStore(sys.argv[1] + "/store", 4), rank=rank, world_size=4)
from torch.distributed.device_mesh import init_device_mesh
import shardwise
from shardwise.models.built_in import GPT
from shardwise.models.tensor_parallel import tensor_parallel

mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
peaks = {{}}
for preset in {PRESETS}:
    model = tensor_parallel(GPT(**{SIZES}, fused=False).cuda(), mesh["tp"])
    engine = shardwise.initialize(model, torch.optim.AdamW(model.parameters()), preset, mesh=mesh)
    for step in range(4):
        if step == 3:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        engine.backward(engine(torch.randint({SIZES["vocabulary"]}, ({BATCH}, {SIZES["length"]} + 1), device="cuda")))
        engine.step()
    torch.cuda.synchronize()
    peaks[preset] = torch.cuda.max_memory_allocated()
    engine.destroy()
    del model, engine
    gc.collect()
    torch.cuda.empty_cache()
if rank == 0:
    open(sys.argv[1] + "/peaks.json", "w").write(json.dumps(peaks))
dist.barrier()
os._exit(0)
"""


def build():
    model = GPT(**SIZES, fused=False)
    return model, tokens(BATCH, SIZES["length"], SIZES["vocabulary"])


def test_peaks_are_the_foreseen_ones(tmp_path):
    run_script(PEAKS, tmp_path, 4, LIMIT_S)
    measured = json.loads((tmp_path / "peaks.json").read_text())
    foreseen = {preset: shardwise.foresee(build, preset, 4, "cuda", tp=2).peak_bytes for preset in PRESETS}
    assert foreseen == pytest.approx(measured, rel=0.03)
