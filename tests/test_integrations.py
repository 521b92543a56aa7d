"""What the integrations share, without the libraries that they are for; tests/clients has the rest."""

import importlib
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import shardwise
from shardwise.config import Config
from shardwise.config.sections import Precision
from shardwise.errors import ConfigError
from shardwise.integrations import detach as detaching
from shardwise.integrations import settings
from support import ranks
from support.training import start, train_step

BF16 = Precision(compute="bf16")


def test_a_trainers_settings_complete_the_configuration():
    config = settings.with_settings(Config.load("zero3"), BF16, "bf16=True", 4)
    assert (config.precision, config.batch.accumulation) == (BF16, 4)
    same = settings.with_settings(Config.load("zero3"), None, "", 1)
    assert same.precision.compute == "fp32"
    own = Config.load({"preset": "zero3", "precision": {"compute": "bf16", "reduce_dtype": "fp32"}})
    assert settings.with_settings(own, BF16, "bf16=True", 1).precision.reduce_dtype == "fp32"


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"precision": {"compute": "fp16"}}, "bf16=True and precision.compute: fp16 differ"),
        ({"batch": {"accumulation": 3}}, "batch.accumulation is 3, and the trainer accumulates 2"),
    ],
)
def test_contradictions_are_refused(section, words):
    with pytest.raises(ConfigError, match=words):
        settings.with_settings(Config.load({"preset": "zero2", **section}), BF16, "bf16=True", 2)


@ranks(2)
def test_a_model_keeps_its_values_when_the_engine_is_taken_off(rank, world_size):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).bfloat16().requires_grad_(False), nn.Linear(8, 1))
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    trained = [param for param in model.parameters() if param.requires_grad]
    config = {"preset": "zero3", "precision": {"compute": "bf16"}}
    engine = shardwise.initialize(model, torch.optim.SGD(trained, lr=0.1), config)
    engine.backward(engine(torch.ones(2, 8)).float().mean())
    engine.step()
    before = {name: engine.full_param(name) for name in dtypes}
    detaching.detach(engine, dtypes)
    assert {name: param.dtype for name, param in model.named_parameters()} == dtypes
    assert all(torch.equal(param, before[name].to(param.dtype)) for name, param in model.named_parameters())
    model.float()(torch.ones(2, 8)).mean().backward()


@ranks(2)
def test_a_detached_model_has_its_dtensors_again(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(torch.nn.Linear(8, 8), mesh["tp"], ColwiseParallel())
    before = model.weight.to_local().clone()
    config = {"preset": "zero3", "precision": {"compute": "bf16"}}
    engine = shardwise.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config, mesh=mesh["dp"])
    detaching.detach(engine, {})
    assert torch.equal(model.weight.to_local(), before)


def test_ray_is_told_of_checkpoints_that_exist(tmp_path, monkeypatch):
    """A checkpoint that replaced one of the same step has another name. Ray itself: tests/clients/test_ray.py."""
    reported, context = [], mock.Mock()
    context.get_world_rank.return_value = 0
    context.get_storage.return_value = mock.Mock(storage_filesystem=Path(), experiment_fs_path=tmp_path)
    ray, arrow = mock.MagicMock(), mock.Mock(LocalFileSystem=Path)
    ray.train.get_context.return_value = context
    ray.train.Checkpoint.from_directory = lambda path: mock.Mock(path=str(path))
    ray.train.report = lambda metrics, checkpoint, **_: reported.append(checkpoint)
    ray.train.get_checkpoint = lambda: reported[-1]
    for name, module in {"ray": ray, "ray.train": ray.train, "pyarrow": mock.Mock(), "pyarrow.fs": arrow}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "shardwise.integrations.ray", raising=False)
    integration = importlib.import_module("shardwise.integrations.ray")
    monkeypatch.delitem(sys.modules, "shardwise.integrations.ray")
    engine = start("mlp", {"preset": "zero1"})
    train_step(engine, 0, 0)
    integration.report(engine, {})
    integration.report(engine, {})
    integration.resume(engine)
    assert [Path(each.path).name for each in reported] == ["step-1", "step-1.2"]
    reported.pop()
    integration.resume(engine)
    assert Path(reported[-1].path).is_dir()
    engine.destroy()
