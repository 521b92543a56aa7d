"""The API that DeepSpeed's users write by hand, on two ranks."""

import json
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.compat import activation
from support import ranks, run_ranks


def deepspeed():
    sys.path.insert(0, str(activation.FOLDER))
    import deepspeed

    return deepspeed


def model():
    torch.manual_seed(dist.get_rank())  # rank 0's values count
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def settings(stage, **further):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}},
        "zero_optimization": {"stage": stage},
        **further,
    }


def steps(engine, count, seed=0):
    generator = torch.Generator().manual_seed(seed + 100 * dist.get_rank())
    losses = []
    for _ in range(count):
        loss = engine(torch.randn(2, 8, generator=generator)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def use_by_hand(rank, world_size, stage, folder):
    ds = deepspeed()
    net = model()
    data = [torch.full((8,), float(n)) for n in range(8)]
    engine, optimizer, loader, schedule = ds.initialize(
        model=net, model_parameters=net.parameters(), config=settings(stage), training_data=data
    )
    assert isinstance(engine, ds.DeepSpeedEngine)
    assert isinstance(schedule, ds.runtime.lr_schedules.WarmupLR)
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps(), engine.zero_optimization_stage()) == (
        8,
        2,
        stage,
    )
    assert next(iter(loader)).shape == (2, 8)
    assert not engine.is_gradient_accumulation_boundary()
    steps(engine, 3)
    assert (engine.global_steps, engine.micro_steps) == (1, 3)
    assert engine.is_gradient_accumulation_boundary()
    loss = engine(torch.ones(2, 8)).mean()
    engine.backward(loss)
    weight = net[0].weight
    grad = ds.utils.safe_get_full_grad(weight)
    assert grad.shape == (16, 8)
    engine.step()
    assert engine.get_lr() == [group["lr"] for group in optimizer.param_groups]
    assert float(engine.get_global_grad_norm()) > 0
    value = ds.utils.safe_get_full_fp32_param(weight)
    assert ds.utils.safe_get_full_optimizer_state(weight, "exp_avg").shape == value.shape
    ds.utils.safe_set_full_fp32_param(weight, value + 1)
    assert torch.equal(ds.utils.safe_get_full_fp32_param(weight), value + 1)
    with ds.zero.GatheredParameters(weight):
        assert torch.equal(weight, value + 1)
    with ds.zero.GatheredParameters([weight, None], modifier_rank=1):
        if rank == 1:
            weight.data.fill_(3.0)
    assert torch.equal(ds.utils.safe_get_full_fp32_param(weight), torch.full((16, 8), 3.0))
    engine.zero_grad()
    engine.save_checkpoint(folder, client_state={"epoch": 3})
    later = steps(engine, 4, seed=7)
    assert engine.load_checkpoint(folder) == (f"{folder}/global_step2", {"epoch": 3})
    assert steps(engine, 4, seed=7) == later
    assert engine.load_checkpoint(f"{folder}/nowhere") == (None, None)
    engine.save_16bit_model(folder)
    state = engine.module_state_dict()
    whole = torch.load(f"{folder}/pytorch_model.bin")
    assert all(torch.equal(whole[name], state[name]) for name in state)
    merged = ds.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
    assert torch.equal(merged["0.weight"], torch.full((16, 8), 3.0))
    engine.destroy()
    again, *_ = ds.initialize(model=net, config={"train_batch_size": 2, "zero_optimization": {"stage": 3}})
    assert torch.equal(again.module_state_dict()["0.weight"], state["0.weight"])
    return later


def test_every_stage_serves_the_calls_with_the_same_losses(tmp_path):
    found = [run_ranks(use_by_hand, 2, stage, str(tmp_path / str(stage)), fresh=True) for stage in (0, 1, 2, 3)]
    assert found[1] == found[0]
    assert found[3] == found[2]
    assert found[2][0] == pytest.approx(found[0][0], rel=1e-5)


@ranks(2, fresh=True)
def test_parameters_built_under_init_rest_in_shards(rank, world_size):
    ds = deepspeed()
    with ds.zero.Init(config_dict_or_path=settings(3)):
        net = model()
    weight = net[0].weight
    status = ds.runtime.zero.partition_parameters.ZeroParamStatus
    assert (weight.numel(), weight.ds_numel, weight.ds_shape) == (0, 128, (16, 8))
    assert (weight.ds_tensor.numel(), weight.ds_status) == (64, status.NOT_AVAILABLE)
    params = set(net.parameters()) | {torch.zeros(3)}  # sets: the order differs between ranks
    with ds.zero.GatheredParameters(params, modifier_rank=0):
        assert weight.ds_status == status.AVAILABLE
        first = weight.detach().clone()
        if rank == 0:
            weight.data.add_(1.0)
    torch.manual_seed(0)
    assert torch.equal(first, nn.Linear(8, 16).weight)
    engine, *_ = ds.initialize(model=net, model_parameters=net.parameters(), config=settings(3))
    assert torch.equal(ds.utils.safe_get_full_fp32_param(weight), first + 1)
    assert (weight.shape, weight.ds_status) == ((16, 8), status.NOT_AVAILABLE)
    steps(engine, 2)
    with ds.zero.GatheredParameters([weight]):
        assert weight.ds_status == status.AVAILABLE


@ranks(2, fresh=True)
def test_what_would_change_results_is_refused_by_name(rank, world_size):
    from shardwise.errors import CompatibilityError, ConfigError

    ds = deepspeed()
    net = model()
    for block, name in (
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor parallelism"),
        ({"amp": {"enabled": True}}, "Apex"),
    ):
        with pytest.raises(ConfigError, match=name):
            ds.initialize(model=net, config={**settings(2), **block})
    with pytest.raises(CompatibilityError, match="init_inference"):
        ds.init_inference(net)
    engine, *_ = ds.initialize(model=net, model_parameters=net.parameters(), config=settings(2))
    with pytest.raises(AssertionError, match="incompatible with gradient partitioning"), engine.no_sync():
        pass
    with pytest.raises(CompatibilityError, match=r"engine\.no_sync"):
        engine.backward(engine(torch.ones(2, 8)).mean(), allreduce_gradients=False)
    engine.destroy()
    with pytest.raises(CompatibilityError, match="was destroyed"):
        engine(torch.ones(2, 8))


@ranks(1, fresh=True, init=False)
def test_one_process_without_torchrun_needs_no_process_group(rank, world_size):
    ds = deepspeed()
    net = nn.Linear(8, 4)
    engine, *_ = ds.initialize(model=net, model_parameters=net.parameters(), config=settings(3))
    engine.backward(engine(torch.ones(2, 8)).mean())
    assert ds.comm.get_world_size() == 1


def train_with_public_configurations(rank, world_size, cases):
    """One step with each; the names of those that trained."""
    warnings.simplefilter("ignore")
    ds = deepspeed()
    trained = []
    for name, given in cases.items():
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        given.setdefault("optimizer", {"type": "AdamW"})
        engine, *_ = ds.initialize(model=net, model_parameters=net.parameters(), config=given)
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(torch.ones(2, 8)).float().square().mean())
            engine.step()
        assert engine.global_steps == 1, name
        engine.destroy()
        trained.append(name)
    return trained


def test_public_configurations_train_a_step():
    cases = {}
    for case in json.loads((Path(__file__).parents[1] / "config" / "corpus.json").read_text()):
        given = case["config"]
        text = json.dumps(given)
        # Trainer and Accelerate fill what is open in a schedule; the batch is theirs too; a disk is not here.
        if not case["refused"] and "zero_optimization" in given and "nvme" not in text and "scheduler" not in given:
            cases[case["name"]] = {key: value for key, value in given.items() if "batch_size" not in key}
    assert len(cases) >= 25
    assert run_ranks(train_with_public_configurations, 1, cases, fresh=True)[0] == list(cases)
