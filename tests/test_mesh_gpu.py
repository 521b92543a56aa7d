"""Over NCCL, four ranks on one GPU as two nodes of two: the bits of every placement, sums in two hops, and peaks."""

import json
import os
import subprocess
import sys

import pytest
import torch

from support.nccl import nccl_environment

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LIMIT_S = 240

# Every rank claims a host of its own, so that NCCL accepts them on one GPU; LOCAL_WORLD_SIZE makes two nodes of them.
START = """
import json, os, sys
rank = int(os.environ["RANK"])
import torch, torch.distributed as dist, shardwise
from shardwise.models.built_in import MLP
from support.training import content
torch.cuda.set_device(0)
torch.use_deterministic_algorithms(True)
dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.FileStore(sys.argv[1], 4), rank=rank, world_size=4)
settings = json.loads(sys.argv[2])
"""
TRAIN = """
for config in settings:
    torch.manual_seed(0)
    model = MLP(width=256, depth=6).cuda()
    engine = shardwise.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config)
    count = engine.config.batch.accumulation
    for step in range(6 * count):
        torch.manual_seed(100 * step + rank)
        engine.backward(engine(torch.randn(8, 256, device="cuda")))
        engine.step()
    bits = [content(engine.full_param(name)).tolist() for name, _ in model.named_parameters()]
    print("SEEN", json.dumps({"bits": bits, "axis_bytes": engine.report().axis_bytes}), flush=True)
    engine.destroy()
"""
REDUCE = """
class Product(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(100_000))
    def forward(self, x):
        return (self.weight * x).sum()
torch.manual_seed(7)
values = (torch.randn(4, 100_000) * 10.0 ** torch.randint(-3, 4, (4, 100_000))).cuda()
for config in settings:
    model = Product().cuda()
    engine = shardwise.initialize(model, torch.optim.SGD(model.parameters()), config)
    for _ in range(3):
        engine.backward(engine(values[rank]))
        grad = engine.full_grad("weight")
        engine.zero_grad()
    expected = ((values[0] + values[1]) * 0.5 + (values[2] + values[3]) * 0.5) * 0.5
    is_close = torch.allclose(grad, values.mean(0), rtol=1e-3, atol=1e-2)
    print("SEEN", json.dumps({"is_equal": torch.equal(grad, expected), "is_close": is_close}), flush=True)
    engine.destroy()
"""


def seen(tmp_path, body, settings):
    """What each rank printed, by rank, a list for each of the settings."""
    (tmp_path / "script.py").write_text(START + body + "dist.destroy_process_group()\n")
    processes = []
    for rank in range(4):
        own = {"RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
        own |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "store"), json.dumps(settings)]
        environment = {**os.environ, **nccl_environment(rank), **own}
        with (tmp_path / f"out{rank}").open("w") as out:
            processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    outputs = [(tmp_path / f"out{rank}").read_text() for rank in range(4)]
    assert codes == [0] * 4, "\n".join(output[-3000:] for output in outputs)
    return [
        [json.loads(line.removeprefix("SEEN ")) for line in output.splitlines() if line.startswith("SEEN ")]
        for output in outputs
    ]


def config(preset, precision, accumulation, order=None):
    gradients = {"clip_norm": 0.5} | ({"order": order} if order else {})
    batch = {"accumulation": accumulation}
    return {"preset": preset, "precision": {"compute": precision}, "batch": batch, "gradients": gradients}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_placement_gives_the_same_bits(tmp_path, precision, accumulation):
    order = "sharded" if accumulation == 1 else "node"
    presets = ["zero0", "zero1", "zero2", "zero3", "zero3_hybrid"]
    found = seen(tmp_path, TRAIN, [config(preset, precision, accumulation, order) for preset in presets])
    first = found[0][0]["bits"]
    for runs in found:
        assert [run["bits"] == first for run in runs] == [True] * len(presets)
    sent = dict(zip(presets, (run["axis_bytes"] for run in found[0]), strict=True))
    assert all(each["outer"] > 0 for each in sent.values())
    assert sent["zero3_hybrid"]["outer"] < sent["zero3"]["outer"]


def test_gradients_are_added_in_the_node_then_across(tmp_path):
    found = seen(tmp_path, REDUCE, ["zero1", "zero3", "zero3_hybrid"])
    assert [[run["is_equal"] for run in runs] for runs in found] == [[True] * 3] * 4


def test_the_backends_own_reduction(tmp_path):
    native = [
        {"preset": preset, "communication": {"reduce": "native"}} for preset in ("zero1", "zero3", "zero3_hybrid")
    ]
    assert [[run["is_close"] for run in runs] for runs in seen(tmp_path, REDUCE, native)] == [[True] * 3] * 4
