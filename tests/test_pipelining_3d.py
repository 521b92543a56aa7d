"""pp x dp x tp on eight processes: trains as one process does, and the example learns."""

import re
import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import shardwise
from shardwise.models.built_in import GPT
from shardwise.models.tensor_parallel import tensor_parallel
from support import run_ranks

ROOT = Path(__file__).parents[1]
BATCH, STEPS, CLIP = 8, 2, 0.5


def make_gpt():
    torch.manual_seed(1)
    model = GPT(16, 4, 2, 32, 8, tied=True, fused=False)
    for param in model.parameters():
        nn.init.normal_(param.data, std=0.2)
    return model


def tokens_of(step, replica):
    return torch.randint(0, 32, (BATCH, 9), generator=torch.Generator().manual_seed(10 * step + replica))


def sgd(params):
    return torch.optim.SGD(params, lr=0.01)


def train_plainly():
    """The weights, and the norms and losses of each step; also the loss of three further sequences."""
    model, norms, losses = make_gpt(), [], []
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append([model(tokens_of(step, replica)) for replica in range(2)])
        (sum(losses[-1]) / 2).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        optimizer.step()
    return model, norms, losses, model(tokens_of(STEPS, 0)[:3])


def compare_with_one_process(mesh, schedule, preset):
    model, norms, losses, after = train_plainly()
    config = {"preset": preset, "gradients": {"clip_norm": CLIP}}
    cut = tensor_parallel(make_gpt(), mesh["tp"])
    pipe = shardwise.pipeline(cut, mesh, sgd, config, schedule=schedule, micro_batches=4)
    replica = mesh["dp"].get_local_rank()
    for step in range(STEPS):
        loss = pipe.train_step(tokens_of(step, replica))
        torch.testing.assert_close(loss, losses[step][replica].detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(pipe.grad_norm, norms[step], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pipe.evaluate(tokens_of(STEPS, 0)[:3]), after.detach(), rtol=1e-5, atol=1e-6)
    seen = 0
    for name, param in model.named_parameters(remove_duplicate=False):
        value = pipe.full_param(name)
        if value is not None:
            difference = (value - param.detach()).norm() / param.detach().norm()
            assert difference < 2e-7, (schedule, preset, name, difference.item())
            seen += 1
    assert seen
    pipe.destroy()


def train_in_3d(rank, world_size, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)  # torchrun's is for the example
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    for schedule, preset in (("1F1B", "zero2"), ("ZBVZeroBubble", "zero3")):
        compare_with_one_process(mesh, schedule, preset)
    dist.destroy_process_group()
    _clear_sharding_prop_cache()  # it has the mesh, whose groups are gone
    runpy.run_path(str(ROOT / "examples" / "three_d.py"), run_name="__main__")


@pytest.mark.timeout(300)
def test_three_axes_train_as_one_process_does_and_the_example_learns(tmp_path):
    outcomes = run_ranks(train_in_3d, 8, tmp_path, fresh=True, init=False, torchrun=True, check=False, timeout=200)
    for outcome in outcomes:
        assert outcome.ok, outcome.describe()
    losses = [float(each) for each in re.findall(r"loss ([\d.]+)", outcomes[0].describe())]
    assert losses[-1] < losses[0] - 0.5
