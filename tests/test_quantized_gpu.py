"""Quantised bases over NCCL, two ranks on one GPU: `pytest -m gpu tests/test_quantized_gpu.py`."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import shardwise
from support import run_ranks
from support.nccl import nccl_environment
from test_quantized import STEPS, WIDTH, build, of_dtype, raw, wrapped

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MAKES = {"int8": of_dtype(torch.int8), "int16": of_dtype(torch.int16), "wrapped": wrapped}
MAKES["float8"] = of_dtype(torch.float8_e4m3fn)


def test_every_dtype_is_gathered_over_nccl():
    options = {"fresh": True, "init": False, "torchrun": True, "timeout": 250}
    for found in run_ranks(train_all, 2, **options):
        for name, losses in found.items():
            assert all(each == losses["zero1"] for each in losses.values()), name


def train_all(rank, world_size):
    os.environ.update(nccl_environment(rank))
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=60))
    presets = ("zero1", "zero2", "zero3", "zero3_offload")
    return {name: {preset: train(make, preset, rank) for preset in presets} for name, make in MAKES.items()}


def train(make, preset, rank):
    torch.set_default_device("cuda")
    try:
        model = build(make)
    finally:
        torch.set_default_device("cpu")
    base = [raw(block.weight.values if make is wrapped else block.weight).cpu() for block in model]
    trained = [param for param in model.parameters() if param.requires_grad]
    config = {"preset": preset, "precision": {"compute": "bf16"}, "gradients": {"order": "sharded"}}
    engine = shardwise.initialize(model, torch.optim.AdamW(trained, lr=1e-2), config)
    losses = []
    for step in range(STEPS):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)).cuda()
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    for block, before in zip(model, base, strict=True):
        with shardwise.gathered(block.weight):
            now = block.weight.values if make is wrapped else block.weight
            assert torch.equal(raw(now).cpu(), before)
    engine.destroy()
    return losses
