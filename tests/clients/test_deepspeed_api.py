"""The API that DeepSpeed's users write by hand, on two ranks."""

import base64
import contextlib
import importlib
import json
import os
import re
import runpy
import sys
import warnings
from argparse import Namespace
from collections import OrderedDict
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pydantic import Field
from torch import nn

from clients.devices import DEVICES, share_gpu
from shardwise.compat import activation
from shardwise.errors import CheckpointError, CompatibilityError
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


def test_every_stage_serves_the_calls_with_the_same_losses(tmp_path, monkeypatch):
    found = [run_ranks(use_by_hand, 2, stage, str(tmp_path / str(stage)), fresh=True) for stage in (0, 1, 2, 3)]
    assert found[1] == found[0]
    assert found[3] == found[2]
    assert found[2][0] == pytest.approx(found[0][0], rel=1e-5)
    script = tmp_path / "3" / "zero_to_fp32.py"
    monkeypatch.setattr(sys, "argv", [str(script), str(script.parent), str(tmp_path / "merged.bin")])
    runpy.run_path(str(script))
    assert torch.equal(torch.load(tmp_path / "merged.bin")["0.weight"], torch.full((16, 8), 3.0))


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


def count_with_accelerate(rank, world_size):
    activation.activate()
    from accelerate import PartialState  # after it

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    assert PartialState().num_processes == 1  # there is no GPU, and no backend was given
    net = nn.Linear(8, 4)
    with pytest.raises(CompatibilityError, match=r"Accelerate counts 1 processes, and 2 were started.*use_cpu=True"):
        deepspeed().initialize(model=net, model_parameters=net.parameters(), config=settings(2))


@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs the extra hf")
def test_a_client_that_takes_every_process_for_the_only_one_is_told(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run_ranks(count_with_accelerate, 2, fresh=True, init=False, torchrun=True)


@ranks(1)
def test_small_calls_of_users_are_served_and_others_named(rank, world_size):
    ds = deepspeed()
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    data = [torch.full((8,), float(n)) for n in range(5)]
    saved = {"activation_checkpointing": {"cpu_checkpointing": True}, "dataloader_drop_last": True}
    engine, optimizer, loader, _ = ds.initialize(
        model=net, model_parameters=net.parameters(), config=settings(3, **saved), training_data=data
    )
    assert isinstance(optimizer, ds.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3)
    assert not isinstance(optimizer, ds.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer)
    assert len(loader) == 2  # of five samples, two and two
    rows = ds.utils.RepeatingLoader(loader)
    applied = []
    for _ in range(4):
        engine.backward(engine(next(rows)).mean())
        assert engine.clip_grad_norm_(1e-3) > 0 if engine.is_gradient_accumulation_boundary() else True
        engine.step()
        applied.append(engine.was_step_applied())
    assert applied == [False, True, False, True]
    engine.set_lr(0.5)
    assert engine.get_lr() == [optimizer.param_groups[0]["lr"]] == [0.5]
    assert engine.get_batch_info() == (4, 2, 2)
    assert (engine.optimizer_name(), engine.scheduler_name()) == ("adamw", "WarmupLR")
    with ds.OnDevice(dtype=torch.bfloat16, device="meta"):
        built = nn.Linear(4, 4)
    assert (built.weight.dtype, built.weight.is_meta, torch.get_default_dtype()) == (
        torch.bfloat16,
        True,
        torch.float32,
    )
    assert ds.utils.set_z3_leaf_modules(net, [nn.Tanh]) == ds.utils.get_z3_leaf_modules(net) == [net[1]]
    with pytest.raises(ValueError, match="No modules of type"):
        ds.utils.unset_z3_leaf_modules(net, ["Conv2d"])
    with ds.runtime.zero.unwrap_model_for_generation(engine) as whole:
        assert whole is net
        assert not whole[0].weight.isnan().any()
    x = torch.ones(2, 4, requires_grad=True)
    ds.checkpointing.checkpoint(nn.Linear(4, 4), x).sum().backward()
    assert x.grad is not None
    with pytest.raises(AttributeError, match="'eigenvalues', and neither has DeepSpeedEngine as shardwise serves it"):
        engine.eigenvalues()
    with pytest.raises(ModuleNotFoundError, match=r"deepspeed\.profiling is not in the module .* torch\.profiler"):
        importlib.import_module("deepspeed.profiling.flops_profiler")
    with pytest.raises(ModuleNotFoundError, match="without a conversion"):
        importlib.import_module("deepspeed.checkpoint.reshape_utils")
    with pytest.raises(CompatibilityError, match="shardwise plan MODEL"):
        ds.runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_live(net, num_gpus_per_node=8)


@ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_states_move_to_the_host_between_steps(rank, world_size, stage):
    ds, net = deepspeed(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    kinds = ds.runtime.zero.offload_config.OffloadStateTypeEnum
    engine, *_ = ds.initialize(model=net, config=settings(stage, gradient_accumulation_steps=1, bf16={"enabled": True}))

    def on_device():
        return engine.shardwise_engine.report().tier_bytes.get("device", 0)

    def train():
        engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)).square().mean())
        engine.step()

    train()
    whole, expected = on_device(), ds.utils.safe_get_full_fp32_param(net[0].weight).clone()
    engine.offload_states(include=[kinds.optim_states, kinds.hp_params, kinds.contiguous_grad_buffer])
    engine.offload_states(device="cpu", pin_memory=False, non_blocking=True)
    assert 0 < on_device() < whole if stage == 1 else on_device() == 0  # replicated weights stay
    with pytest.raises(RuntimeError, match="leave its `with` block first"):
        train()
    engine.zero_grad()
    for _ in range(2):
        engine.reload_states(non_blocking=True)
    assert on_device() == whole
    assert torch.equal(ds.utils.safe_get_full_fp32_param(net[0].weight), expected)
    train()
    with pytest.raises(CompatibilityError, match="states move to 'cpu' alone"):
        engine.offload_states(device="nvme")
    engine.offload_states()
    engine.destroy()


@ranks(2)
def test_parameters_of_an_engine_are_opened_and_closed_one_by_one(rank, world_size):
    ds, net = deepspeed(), nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    dist.broadcast(net[0].weight.data, 0)
    built, params = net[0].weight.detach().clone(), list(net.parameters())
    config = settings(3, gradient_accumulation_steps=1, scheduler=None)

    def train(engine):
        engine.backward(engine(torch.ones(2, 64)).square().mean())
        engine.step()

    engine, *_ = ds.initialize(model=net, model_parameters=params, config=config)
    params[0].all_gather_coalesced(params).wait()
    assert torch.equal(params[0], built)
    train(engine)
    assert all(torch.equal(param, ds.utils.safe_get_full_fp32_param(param)) for param in params)
    params[0].partition(param_list=params)
    assert {param.ds_status.name for param in params} == {"NOT_AVAILABLE"}
    params[0].all_gather()
    params[0].all_gather()
    assert not torch.equal(params[0], built)
    engine.destroy()
    engine, *_ = ds.initialize(model=net, model_parameters=params, config=config)
    train(engine)
    params[0].all_gather()
    assert not params[0].isnan().any()


@ranks(2)
def test_what_is_written_between_all_gather_and_partition_is_kept_on_request(rank, world_size):
    ds = deepspeed()
    with ds.zero.Init():
        net = nn.Linear(8, 8, bias=False)

    def write(value, is_kept):
        net.weight.all_gather()
        net.weight.data.fill_(value)
        net.weight.partition(has_been_updated=is_kept)

    write(3.0, is_kept=True)
    write(-1.0, is_kept=False)
    with ds.zero.GatheredParameters(net.weight):
        assert torch.all(net.weight == 3.0)
    config = settings(3, bf16={"enabled": True})
    _engine, *_ = ds.initialize(model=net, model_parameters=net.parameters(), config=config)
    write(5.0, is_kept=True)
    assert torch.all(ds.utils.safe_get_full_fp32_param(net.weight) == 5.0)


@ranks(2)
def test_tensors_of_a_state_dict_stand_for_the_parameters_that_no_file_had(rank, world_size):
    """As transformers 4.57 fills them: it passes all, without its mark on those that it has loaded."""
    ds = deepspeed()
    with ds.zero.Init():
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for loaded in net[0].parameters():
        loaded._is_hf_initialized = True
    with ds.zero.GatheredParameters(list(net.state_dict().values()), modifier_rank=0):
        assert net[0].weight.numel() == 0
        nn.init.constant_(net[1].weight, rank + 3.0)
    with ds.zero.GatheredParameters(net[1].weight):
        assert torch.equal(net[1].weight, torch.full((4, 4), 3.0))


@ranks(2)
def test_a_consolidated_state_dict_has_all_names_of_shared_tensors(rank, world_size):
    """PEFT looks for the projections of VeRA, which all layers share, under the name that is last of all."""
    net = model()
    net[2].register_buffer("scale", torch.ones(4))
    net.register_buffer("scale", net[2].scale)
    net.add_module("again", net[2])
    engine, *_ = deepspeed().initialize(model=net, config=settings(3))
    expected, found = engine.module_state_dict(), engine._zero3_consolidated_16bit_state_dict()
    assert (found is None) == (rank != 0)
    assert found is None or found.keys() == expected.keys() >= {"scale", "2.scale", "again.scale", "again.weight"}
    assert found is None or all(torch.equal(found[name], expected[name]) for name in expected)


@ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_values_of_another_size_are_refused(rank, world_size, stage):
    ds, net = deepspeed(), nn.Linear(8, 8)
    engine, *_ = ds.initialize(model=net, model_parameters=net.parameters(), config=settings(stage))
    steps(engine, 1)
    engine.backward(engine(torch.ones(2, 8)).mean())
    utils, before = ds.utils, ds.utils.safe_get_full_fp32_param(net.weight)
    for setter, further in (
        (utils.safe_set_full_fp32_param, ()),
        (utils.safe_set_full_grad, ()),
        (utils.safe_set_full_optimizer_state, ("exp_avg",)),
        (utils.safe_set_local_fp32_param, ()),
        (utils.safe_set_local_grad, ()),
        (utils.safe_set_local_optimizer_state, ("exp_avg",)),
    ):
        with pytest.raises(AssertionError, match="Number of elements do not match: 65 are given"):
            setter(net.weight, torch.ones(65), *further)
    assert torch.equal(utils.safe_get_full_fp32_param(net.weight), before)


@ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_values_that_are_not_there_are_not_set(rank, world_size, stage):
    ds, net = deepspeed(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    net[0].weight.requires_grad_(False)
    engine, *_ = ds.initialize(model=net, model_parameters=net.parameters(), config=settings(stage))
    utils, trained, frozen, ones = ds.utils, net[1].weight, net[0].weight, torch.ones(8, 8)
    for name in ("safe_set_full_grad", "safe_set_local_grad"):
        with pytest.raises(ValueError, match=r"'1.weight' has no reduced gradient now: set it after the last backward"):
            getattr(utils, name)(trained, ones)
        with pytest.raises(ValueError, match=r"'0.weight' is frozen, and has no gradient to set"):
            getattr(utils, name)(frozen, ones)
        with pytest.raises(ValueError, match="under no engine"):
            getattr(utils, name)(nn.Parameter(ones), ones)
    own = utils.safe_get_local_fp32_param(trained)
    for when in ("none before its first step", "'exp_avg', 'exp_avg_sq'"):
        for setter, values in (("safe_set_full_optimizer_state", ones), ("safe_set_local_optimizer_state", own)):
            with pytest.raises(ValueError, match=f"no state 'momentum': it has {when}"):
                getattr(utils, setter)(trained, values, "momentum")
        steps(engine, 2)
    with pytest.raises(ValueError, match=r"'0.weight' is frozen, and has no state to set"):
        utils.safe_set_full_optimizer_state(frozen, ones, "exp_avg")
    utils.safe_set_full_optimizer_state(trained, ones, "exp_avg")
    assert torch.equal(utils.safe_get_full_optimizer_state(trained, "exp_avg"), ones)


@ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_no_loss_or_no_model_is_named(rank, world_size, stage):
    ds, net = deepspeed(), nn.Linear(8, 8)
    with pytest.raises(AssertionError, match=r"requires a model, a torch.nn.Module: model is a function"):
        ds.initialize(model=lambda inputs: inputs, config=settings(stage))
    engine, *_ = ds.initialize(model=net, model_parameters=net.parameters(), config=settings(stage))
    outputs = engine(torch.ones(2, 8))
    for loss, message in (
        (3.0, "not a float: pass the model's loss"),
        (outputs, r"not one of shape \(2, 8\): reduce it by"),
        (outputs.mean().detach(), "this one was detached, or made under no_grad"),
    ):
        with pytest.raises(AssertionError, match=message):
            engine.backward(loss)


@ranks(2)
def test_collectives_take_deepspeeds_words_about_logging(rank, world_size):
    comm, values = deepspeed().comm, torch.ones(2) + rank
    comm.all_reduce(values, op=comm.ReduceOp.MAX, prof=True, log_name="sum", debug="here")
    assert values.tolist() == [2.0, 2.0]
    comm.broadcast(tensor=values.mul_(rank + 1), src=1, prof=False)
    assert values.tolist() == [4.0, 4.0]
    parts = [torch.empty(2) for _ in range(2)]
    comm.all_gather(parts, values + rank, log_name="parts")
    assert [part[0].item() for part in parts] == [4.0, 5.0]
    assert comm.inference_all_reduce(values, log_name="inference") is values
    assert values.tolist() == [8.0, 8.0]


@ranks(1)
def test_trl_sees_the_hooks_that_it_removes_and_puts_back(rank, world_size):
    ds, net = deepspeed(), nn.Linear(8, 8)
    engine, optimizer, *_ = ds.initialize(model=net, model_parameters=net.parameters(), config=settings(3))
    offload = optimizer.parameter_offload
    with ds.runtime.zero.unwrap_model_for_generation(engine):
        assert not offload.forward_hooks
    assert offload.forward_hooks
    for add in ("_register_deepspeed_module", "_register_hooks_recursively"):  # from DeepSpeed 0.16.4 on, and before
        for hook in offload.forward_hooks + offload.backward_hooks:
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        getattr(offload, add)(offload.module)
        assert offload.forward_hooks
    steps(engine, 2)


@ranks(1)
def test_rates_after_a_step_are_those_of_the_next_one(rank, world_size):
    ds, rates = deepspeed(), []
    for half in ({}, {"fp16": {"enabled": True, "initial_scale_power": 4}}):
        net = nn.Linear(8, 8)
        config = settings(1, gradient_accumulation_steps=1, **half)
        engine, _, _, schedule = ds.initialize(model=net, model_parameters=net.parameters(), config=config)
        rates.append([])
        for _ in range(3):
            steps(engine, 1)
            rates[-1].append((schedule.get_last_lr(), engine.get_lr()))
    assert rates[0] == rates[1]


@ranks(1)
def test_init_reads_a_configuration_from_a_file(rank, world_size, tmp_path):
    ds, path = deepspeed(), tmp_path / "zero3.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, "enable_sanity_checks": True}}))
    with ds.zero.Init(config_dict_or_path=str(path)):
        net = nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match="in-place modification"), ds.zero.GatheredParameters(net.weight):
        nn.init.ones_(net.weight)
    with ds.zero.Init(config_dict_or_path="not-there.json", enabled=False):
        assert not hasattr(nn.Linear(4, 4).weight, "ds_id")


@ranks(1)
def test_folders_for_states_on_disk_are_made(rank, world_size, tmp_path):
    config = settings(3)
    for name in ("param", "optimizer"):
        config["zero_optimization"][f"offload_{name}"] = {"device": "nvme", "nvme_path": str(tmp_path / "new" / name)}
    engine, *_ = deepspeed().initialize(model=(net := model()), model_parameters=net.parameters(), config=config)
    steps(engine, 2)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["optimizer", "param"]


@ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_size_of_a_step_is_changed_between_steps(rank, world_size, stage):
    ds = deepspeed()
    losses = []
    for count in (1, 2):
        net = model()
        config = settings(stage, gradient_accumulation_steps=count, scheduler=None)
        engine, *_ = ds.initialize(model=net, model_parameters=net.parameters(), config=config)
        if count == 1:
            engine.set_train_batch_size(8)
            assert (engine.gradient_accumulation_steps(), engine.train_batch_size()) == (2, 8)
        losses.append(steps(engine, 6))
        assert engine.global_steps == 3
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=1e-7)
    engine.set_train_micro_batch_size(1)
    assert engine.get_batch_info() == (4, 1, 2)
    with pytest.raises(ValueError, match="pass a multiple of 2"):
        engine.set_train_batch_size(3)
    assert engine.global_samples == 3 * 8  # counted with the size that each step had
    engine.backward(engine(torch.ones(2, 8)).mean())
    with pytest.raises(CompatibilityError, match=r"change it after step\(\)"):
        engine.set_train_batch_size(8)


@ranks(1)
def test_engines_answer_what_scripts_read_and_refuse_what_would_be_ignored(rank, world_size):
    ds = deepspeed()
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    net[0].bias.requires_grad_(False)
    config = settings(3, zero_allow_untested_optimizer=True)
    config["zero_optimization"] |= {"stage3_prefetch_bucket_size": 5, "reduce_bucket_size": 7}
    trained = [param for param in net.parameters() if param.requires_grad]
    engine, *_ = ds.initialize(model=net, model_parameters=trained, config=config)
    assert (engine.zero_prefetch_bucket_size(), engine.zero_reduce_bucket_size()) == (5, 7)
    assert (engine.zero_allow_untested_optimizer(), engine.dump_state(), engine.zero_offload_param()) == (
        True,
        False,
        None,
    )
    assert engine.optimizer_params() == {"lr": 1e-2}
    assert engine.param_names[net[2].bias] == "2.bias"
    assert (engine.mpu, engine.monitor.enabled, engine.dist_backend) == (None, False, "gloo")
    assert sorted(engine.module_state_dict(exclude_frozen_parameters=True)) == ["0.weight", "2.bias", "2.weight"]
    assert [row.tolist() for row in engine.deepspeed_io(list(range(5)), 2, "eval")] == [[0, 1], [2, 3], [4]]
    with pytest.raises(AssertionError, match=r"backward\(\) takes a scalar tensor"):
        engine.backward(engine(torch.ones(2, 8)))
    engine.zero_grad()
    steps(engine, 2)
    with pytest.raises(ValueError, match=r"no state 'exp_avgs': it has .*'exp_avg'"):
        ds.utils.safe_get_full_optimizer_state(net[0].weight, "exp_avgs")
    with pytest.raises(CompatibilityError, match="custom_load_fn is not supported"):
        engine.load_module_state_dict({}, custom_load_fn=print)
    with pytest.raises(TypeError, match="training_dta"):
        ds.initialize(model=net, training_dta=[], config=config)
    assert not isinstance(net, ds.PipelineModule | ds.InferenceEngine)
    with pytest.raises(CompatibilityError, match="PipelineModule is not served"):
        ds.PipelineModule(layers=[])


@ranks(2)
def test_init_builds_in_the_dtype_that_is_asked_for(rank, world_size):
    ds = deepspeed()
    torch.manual_seed(0)
    with ds.zero.Init(dtype=torch.bfloat16):
        net = nn.Linear(4, 4)
    assert net.weight.dtype is net.weight.ds_tensor.dtype is torch.bfloat16
    with ds.zero.GatheredParameters(net.weight):
        torch.manual_seed(0)
        assert torch.equal(net.weight, nn.Linear(4, 4).weight.bfloat16())
    some = dist.new_group([0])
    if rank == 0:
        with pytest.raises(CompatibilityError, match="names some of the ranks"):
            ds.zero.Init(data_parallel_group=some)
    with pytest.raises(CompatibilityError, match="zero_quantized_weights"):
        ds.zero.Init(zero_quantized_weights=True)


def test_schedules_take_the_state_of_deepspeeds(served):
    lr_schedules = importlib.import_module("deepspeed.runtime.lr_schedules")
    rates = []
    for is_loaded in (False, True):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        schedule = lr_schedules.WarmupLR(optimizer, warmup_max_lr=0.1, warmup_num_steps=9)
        if is_loaded:
            schedule.load_state_dict({"last_batch_iteration": 3})
        else:
            for _ in range(4):
                optimizer.step()
                schedule.step()
            assert schedule.state_dict()["last_batch_iteration"] == 3
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1]


class Tied(nn.Module):
    """A model with a tied, a frozen and an unused parameter; its loss is returned beside what it is computed from."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)

    def forward(self, x):
        logits = self.second(torch.tanh(self.first(x)))
        return OrderedDict(logits=logits, loss=logits.square().mean())


def tied_engine(ds, stage, **further):
    torch.manual_seed(3)
    with ds.zero.Init(config_dict_or_path=settings(stage), enabled=stage == 3):
        with ds.zero.Init(config_dict_or_path=settings(stage), enabled=stage == 3):
            net = Tied()
        assert hasattr(net.first.weight, "ds_id") == (stage == 3)
    trained = [param for name, param in net.named_parameters() if not name.startswith("unused")]
    return ds.initialize(model=net, model_parameters=trained, config=settings(stage, **further))[0]


@ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_are_the_same_however_backward_is_called(rank, world_size, stage):
    ds, grads = deepspeed(), []
    calls = {
        "engine": lambda engine, out: engine.backward(out["loss"]),
        "kept": lambda engine, out: engine.backward(out["loss"], retain_graph=True),
        "loss": lambda engine, out: out["loss"].backward(),
        "logits": lambda engine, out: engine.scale(out["logits"].square().mean()).backward(),
    }
    for call in calls.values():
        engine = tied_engine(ds, stage)
        net = engine.module
        for n in range(2):
            call(engine, engine(torch.full((2, 8), float(rank + n))))
            if not engine.is_gradient_accumulation_boundary():
                engine.step()
        grads.append([ds.utils.safe_get_full_grad(param) for param in (net.first.weight, net.second.bias)])
        for frozen in (net.first.bias, net.unused.weight):
            assert not frozen.requires_grad  # the latter is in no group of the optimizer
            assert ds.utils.safe_get_full_fp32_param(frozen) is None
            assert ds.utils.safe_get_local_grad(frozen) is None
        engine.allreduce_gradients()
    assert all(torch.equal(*pair) for other in grads[1:] for pair in zip(grads[0], other, strict=True))
    bias, doubled = net.second.bias, 2 * grads[0][1]
    ds.utils.safe_update_full_grad_vectorized([bias], lambda old, param: 2 * old)
    assert torch.equal(ds.utils.safe_get_full_grad(bias), doubled)
    ds.utils.safe_set_local_grad(bias, 2 * ds.utils.safe_get_local_grad(bias))
    assert torch.equal(ds.utils.safe_get_full_grad(bias), 2 * doubled)
    engine.step()


@ranks(2)
def test_a_checkpoint_is_saved_between_micro_batches_and_found_under_another_name(rank, world_size, tmp_path):
    ds = deepspeed()
    universal = importlib.import_module("deepspeed.checkpoint.ds_to_universal")
    engine = tied_engine(ds, 2)
    engine.backward(engine(torch.ones(2, 8))["loss"])
    engine.step()
    engine.save_checkpoint(tmp_path, tag=f"of-rank-{rank}", client_state={"epoch": 1})
    if rank == 0:
        universal.main(Namespace(input_folder=tmp_path / "of-rank-0", output_folder=tmp_path / "copied"))
    dist.barrier()
    merged = ds.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, tag="copied")
    Tied().load_state_dict(merged, strict=True)
    saved = engine.state_dict()
    again = ds.initialize(model=engine.module, config=settings(1))[0]  # destroys the first engine
    with pytest.raises(CompatibilityError, match="this engine was destroyed"):
        engine(torch.ones(2, 8))
    assert again.load_checkpoint(tmp_path, tag="copied")[1] == {"epoch": 1}
    assert all(torch.equal(saved[f"module.{name}"], value) for name, value in again.module.state_dict().items())
    strict = tied_engine(ds, 1, checkpoint={"tag_validation": "Fail"})
    with pytest.raises(AssertionError, match="under different tags"):
        strict.save_checkpoint(tmp_path, tag=str(rank))
    with pytest.raises(ds.DeepSpeedConfigError, match="tag_validation"):
        tied_engine(ds, 1, checkpoint={"tag_validation": "never"})


@ranks(1)
def test_what_deepspeed_refuses_of_an_optimizer_is_refused(rank, world_size):
    ds, net = deepspeed(), nn.Linear(8, 8)
    plain = {key: value for key, value in settings(2).items() if key not in ("optimizer", "scheduler")}
    own = type("Own", (torch.optim.SGD,), {"__module__": "script"})(net.parameters())
    with pytest.raises(AssertionError, match="zero_allow_untested_optimizer is false"):
        ds.initialize(model=net, optimizer=own, config=plain | {"zero_allow_untested_optimizer": False})
    with pytest.raises(AssertionError, match="optimizer is a list"):
        ds.initialize(model=net, optimizer=[own], config=settings(2))
    engine, *_ = ds.initialize(model=net, config=plain)
    for call in (lambda: engine.backward(engine(torch.ones(2, 8)).mean()), engine.step):
        with pytest.raises(AssertionError, match="must provide optimizer"):
            call()
    half = {"fp16": {"enabled": True, "loss_scale": 138.0}}
    fused = ds.ops.adam.FusedAdam(params=net.parameters(), lr=1e-3)
    engine, optimizer, *_ = ds.initialize(model=net, optimizer=fused, config=plain | half)
    assert isinstance(optimizer, ds.runtime.base_optimizer.ZeROOptimizer)
    assert optimizer.needs_scaler()
    assert (optimizer.dynamic_loss_scale, optimizer.loss_scaler.loss_scale) == (False, 138.0)
    assert (optimizer.loss_scaler.cur_iter, optimizer.loss_scaler.scale_window, optimizer.min_loss_scale) == (
        0,
        1000,
        1,
    )
    with pytest.raises(RuntimeError, match="Loss scaling is required"):
        engine(torch.ones(2, 8)).mean().backward()
    with pytest.raises(AssertionError, match="scalar tensor"):
        engine.scale(engine(torch.ones(2, 8)))
    engine.scale(engine(torch.ones(2, 8)).mean()).backward()
    assert ds.utils.safe_get_full_grad(net.weight) is not None


@ranks(2)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 3}, "no multiple of"),
        ({"train_batch_size": 5, "train_micro_batch_size_per_gpu": 2}, "does not multiply|no multiple of"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "switch one of the two off"),
        ({"optimizer": {"type": "Foo"}}, "nor a name of torch.optim"),
        ({"zero_optimization": {"stage": 4}}, "a stage from 0 to 3"),
    ],
)
def test_an_invalid_configuration_is_what_scripts_catch(rank, world_size, change, message):
    ds, net = deepspeed(), nn.Linear(8, 8)
    config = {key: value for key, value in settings(1).items() if key != "gradient_accumulation_steps"}
    for kind in (AssertionError, ValueError, ds.DeepSpeedConfigError):
        with pytest.raises(kind, match=message):
            ds.initialize(model=net, model_parameters=net.parameters(), config=config | change)
    arguments = Namespace(deepspeed_config=config)
    with pytest.raises(AssertionError, match="both given"):
        ds.initialize(arguments, net, config=config)


@ranks(2)
def test_loaders_for_evaluation_give_each_rank_its_part_in_order(rank, world_size):
    ds, net = deepspeed(), nn.Linear(8, 8)
    engine, *_ = ds.initialize(model=net, model_parameters=net.parameters(), config=settings(1))
    for route in ("eval", "predict"):
        rows = [row.tolist() for row in engine.deepspeed_io(list(range(8)), 2, route)]
        assert rows == [[rank, rank + 2], [rank + 4, rank + 6]]


def test_configurations_are_read_as_objects(served):
    config = importlib.import_module("deepspeed.runtime.config")
    zero = importlib.import_module("deepspeed.runtime.zero.config")
    given = config.DeepSpeedConfig(
        {
            "train_batch_size": 32,
            "train_micro_batch_size_per_gpu": 8,
            "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 5, "cpu_offload": True},
            "bf16": {"enabled": True},
        }
    )
    assert (given.gradient_accumulation_steps, given.bfloat16_enabled, given.fp16_enabled) == (4, True, False)
    assert (given.zero_config.prefetch_bucket_size, given.zero_config.overlap_comm) == (5, True)
    assert isinstance(given.zero_config.offload_optimizer, zero.DeepSpeedZeroOffloadOptimizerConfig)
    with pytest.raises(AssertionError, match="batch"):
        config.DeepSpeedConfig({"train_batch_size": 33, "gradient_accumulation_steps": 2})
    with pytest.raises(ValueError, match="reduce_bucket_size"):
        zero.DeepSpeedZeroConfig(reduce_bucket_size=0)
    with pytest.raises(ValueError, match="finite"):
        importlib.import_module("deepspeed.runtime.precision_config").DeepSpeedFP16Config(loss_scale=float("inf"))
    given = base64.urlsafe_b64encode(b'{"train_batch_size": 6, "zero_optimization": {"stage": 2}}').decode()
    assert config.DeepSpeedConfig(given).zero_optimization_stage == 2
    with pytest.raises(ValueError, match="no such file"):
        config.DeepSpeedConfig("c29tZXRoaW5n")


def test_the_accelerator_of_the_cpu_answers_what_scripts_ask(served, monkeypatch):
    made = importlib.import_module("deepspeed.accelerator").DeepSpeedAccelerator("cpu")
    assert made.on_accelerator(torch.ones(1))
    assert not made.on_accelerator(torch.ones(1, device="meta"))
    made.reset_peak_memory_stats()
    assert 0 < made.memory_allocated() <= made.max_memory_allocated() <= made.total_memory()
    assert 0 < made.available_memory() <= made.total_memory()
    assert made.FloatTensor([1.0]).dtype == torch.float32
    assert (made.is_pinned(torch.ones(1)), made.is_triton_supported(), made.random()) == (False, False, torch.random)
    assert made.amp() is torch.cpu.amp
    made.range_push("forward")
    made.range_pop()
    with pytest.raises(AttributeError, match="nothing"):
        made.nothing  # noqa: B018  # the attribute is looked up
    asked = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", asked.append)
    other = importlib.import_module("deepspeed.accelerator").DeepSpeedAccelerator("cuda")
    for device in (None, 0, 1):
        other.get_rng_state(device)
    assert asked == ["cuda", 0, 1]


def test_messages_of_scripts_are_shown(served, capsys):
    utils = importlib.import_module("deepspeed.utils")
    utils.logger.info("the loss is %s", 1.5)
    utils.log_dist("begins", ranks=[0])  # there is no process group
    utils.logger.debug("hidden")
    shown = capsys.readouterr().out
    assert "[INFO]" in shown
    assert shown.count("the loss is 1.5\n") == shown.count("[Rank -1] begins\n") == 1
    assert "hidden" not in shown


def test_sections_that_users_derive_are_strict_and_follow_new_names(served):
    base = importlib.import_module("deepspeed.runtime.config_utils").DeepSpeedConfigModel

    class Section(base):
        size: int = Field(1, alias="own_size")
        old: str | None = Field(None, json_schema_extra={"deprecated": True, "new_param": "new", "new_param_fn": list})
        new: list[str] | None = None

    assert (Section(size=2).size, Section(own_size=3).size, Section(size="auto").size) == (2, 3, 1)
    assert Section(old="ab").new == ["a", "b"]
    with pytest.raises(AssertionError, match="old is the deprecated name of new"):
        Section(old="ab", new=["a"])
    with pytest.raises(ValueError, match="sise"):
        Section(sise=2)


def test_the_launcher_reads_hostfiles_and_filters(tmp_path, monkeypatch, served):
    runner = importlib.import_module("deepspeed.launcher.runner")
    pool = runner._parse_hostfile(["worker-0 slots=4", "", "# a comment", "worker-1 slots=2"])
    assert pool == {"worker-0": 4, "worker-1": 2}
    assert runner.parse_inclusion_exclusion(pool, "worker-0:0,2@worker-1", "") == {
        "worker-0": [0, 2],
        "worker-1": [0, 1],
    }
    assert runner.parse_inclusion_exclusion(pool, "", "worker-0@worker-1:1") == {"worker-1": [0]}
    for wrong in (["worker-0"], ["worker-0 slots=1", "worker-0 slots=2"], []):
        with pytest.raises(ValueError, match="hostfile"):
            runner._parse_hostfile(wrong)
    for wrong in ("worker-2", "worker-1:2"):
        with pytest.raises(ValueError, match=r"not found|No slot"):
            runner.parse_inclusion_exclusion(pool, wrong, "")
    numa = importlib.import_module("deepspeed.utils.numa")
    assert numa.parse_range_list("0,2-4,6") == [0, 2, 3, 4, 6]
    for wrong in ("0,2-6,5-9", "8,2-6", "1,6-2"):
        with pytest.raises(ValueError, match="have to rise"):
            numa.parse_range_list(wrong)
    with pytest.raises(CompatibilityError, match="under numactl"):
        numa.get_numactl_cmd("0-7", 2, 0)
    with pytest.raises(ValueError, match="leave out --num_gpus"):
        runner.main(["--num_gpus", "1", "-i", "localhost", "script.py"])
    started = []
    monkeypatch.setattr("shardwise.machine.launch.run", lambda count, target: started.append(count))
    (tmp_path / "hosts").write_text("localhost slots=3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    runner.main(["--hostfile", str(tmp_path / "hosts"), "-e", "localhost:1", "script.py"])
    assert (started, os.environ["CUDA_VISIBLE_DEVICES"]) == ([2], "0,2")
    runner.main(["--num_accelerators", "2", "--bind_cores_to_rank", "script.py", "--steps", "3"])
    assert started == [2, 2]
    with pytest.raises(CompatibilityError, match="torchrun with --no-python"):
        runner.main(["--no_python", "program"])


@ranks(1)
def test_an_optimizer_that_makes_states_for_parameters_in_shards(rank, world_size):
    ds, losses = deepspeed(), []
    for stage in (1, 3):
        torch.manual_seed(0)
        with ds.zero.Init(config_dict_or_path=settings(stage), enabled=stage == 3):
            net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        optimizer = torch.optim.Adagrad(net.parameters(), initial_accumulator_value=0.1)  # makes states at once
        given = {key: value for key, value in settings(stage).items() if key not in ("optimizer", "scheduler")}
        losses.append(steps(ds.initialize(model=net, optimizer=optimizer, config=given)[0], 6))
    assert losses[0] == losses[1]


@ranks(1)
def test_parts_of_a_checkpoint_are_loaded(rank, world_size, tmp_path):
    ds = deepspeed()

    def start(stage=1):
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        net[0].requires_grad_(False)
        return ds.initialize(model=net, model_parameters=net.parameters(), config=settings(stage))[0]

    saved = start()
    steps(saved, 6)
    saved.save_checkpoint(tmp_path, client_state={"epoch": 3})
    for options, count in (({"load_optimizer_states": False}, 3), ({"load_module_only": True}, 0)):
        engine = start(2)
        assert engine.load_checkpoint(tmp_path, **options)[1] == {"epoch": 3}
        assert engine.global_steps == count
        assert engine.lr_scheduler.last_batch_iteration == (saved.lr_scheduler.last_batch_iteration if count else -1)
        assert not any(engine.optimizer.state.values())
        for mine, other in zip(engine.module.parameters(), saved.module.parameters(), strict=True):
            assert torch.equal(mine, other)
    foreign = tmp_path / "theirs" / "global_step7"
    foreign.mkdir(parents=True)
    (foreign / "mp_rank_00_model_states.pt").touch()
    with pytest.raises(CheckpointError, match="was written by DeepSpeed: convert it with `shardwise import-deepspeed"):
        engine.load_checkpoint(foreign.parent, tag="global_step7")
    theirs = [str(foreign / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt") for rank in range(12)]
    for path in theirs:
        Path(path).touch()
    assert ds.utils.zero_to_fp32.get_optim_files(foreign) == theirs
    read = ds.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint
    assert set(read(tmp_path)) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert set(read(tmp_path, exclude_frozen_parameters=True)) == {"2.weight", "2.bias"}


def train_with_public_configurations(rank, world_size, cases):
    """One step with each; the names of those that trained."""
    warnings.simplefilter("ignore")
    ds = deepspeed()
    trained = []
    for name, given in cases.items():
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        given.setdefault("optimizer", {"type": "AdamW"})
        engine, *_ = ds.initialize(model=net, model_parameters=net.parameters(), config=given)
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(torch.ones(2, 8)).float().square().mean())
        engine.step()
        assert engine.global_steps == 1, name
        engine.destroy()
        trained.append(name)
    return trained


def filled(config, disk):
    """As Trainer passes it on: no batch of another machine, a schedule of a few steps, the user's own disk."""
    given = {key: value for key, value in config.items() if "batch_size" not in key}
    if "params" in given.get("scheduler", {}):
        known = {"total_num_steps": 8, "warmup_num_steps": 2, "warmup_min_lr": 0, "warmup_max_lr": 1e-3}
        params = given["scheduler"]["params"]
        given["scheduler"]["params"] = {
            key: known.get(key, value) if value == "auto" else value for key, value in params.items()
        }
    return json.loads(re.sub(r'/local_nvme[^"]*', disk, json.dumps(given)))


def test_public_configurations_train_a_step(tmp_path):
    cases = {
        case["name"]: filled(case["config"], str(tmp_path))
        for case in json.loads((Path(__file__).parents[1] / "config" / "corpus.json").read_text())
        if not case["refused"] and "zero_optimization" in case["config"]
    }
    assert len(cases) >= 50
    assert run_ranks(train_with_public_configurations, 1, cases, fresh=True)[0] == list(cases)


SHARED = Path(__file__).parents[3] / "shared" / "ds_configs"
STYLES = ("ms-swift", "LLaMA-Factory", "accelerate", "transformers", "LOMO")


@pytest.mark.clients
@pytest.mark.skipif(not SHARED.is_dir(), reason="no folder of public configurations beside the checkout")
def test_the_configurations_of_a_folder_train_a_step(tmp_path):
    from shardwise.config import Config
    from shardwise.errors import ConfigError

    cases = {}
    for path in sorted(SHARED.glob("*.json")):
        given = json.loads(path.read_text())
        if not path.name.startswith(STYLES) or "zero_optimization" not in given:
            continue
        with contextlib.suppress(ConfigError), warnings.catch_warnings():  # refused: tests/config/test_config_corpus.py
            warnings.simplefilter("ignore")
            Config.load(given)
            cases[path.name] = filled(given, str(tmp_path))
    assert len(cases) >= 40
    assert run_ranks(train_with_public_configurations, 1, cases, fresh=True)[0] == list(cases)


def larger_than_its_budget(rank, world_size):
    """512 MiB of weights that rest on the host: from the constructor on, few of them are on the device at a time."""
    share_gpu(rank)
    ds = deepspeed()
    ds.init_distributed()
    offload = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    config = {**settings(3), "gradient_accumulation_steps": 1, "zero_optimization": offload}
    with ds.zero.Init(config_dict_or_path=config):
        net = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(32)))
    base = nn.Sequential(net, nn.Linear(2048, 1))
    for param in net.parameters():
        param.requires_grad_(False)
    engine, *_ = ds.initialize(model=base, model_parameters=list(base[1].parameters()), config=config)
    engine.backward(engine(torch.ones(2, 2048, device="cuda")).sum())
    engine.step()
    return torch.cuda.max_memory_allocated() / 2**20


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("device", DEVICES[1:])
def test_weights_of_the_host_are_never_all_on_the_device(device, world_size):
    for peak_mib in run_ranks(larger_than_its_budget, world_size, fresh=True, init=False, torchrun=True):
        assert peak_mib < 300


@ranks(4)
def test_a_second_partition_in_the_node_is_stage_3(rank, world_size):
    ds = deepspeed()

    def run(**zero):
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        with ds.zero.Init(), ds.zero.GatheredParameters(list(net.parameters()), modifier_rank=0):
            for param in net.parameters():
                nn.init.constant_(param, 0.1)
        config = settings(3)
        config["zero_optimization"].update(zero)
        engine = ds.initialize(model=net, model_parameters=net.parameters(), config=config)[0]
        assert engine.zero_optimization_stage() == 3
        assert engine.zero_optimization_partition_weights()
        assert all(hasattr(param, "ds_id") for param in net.parameters())
        losses = steps(engine, 4)
        engine.destroy()
        return losses, [param.ds_numel for param in net.parameters()]

    hybrid, flat = run(zero_hpz_partition_size=2), run()
    assert hybrid[1] == flat[1]
    torch.testing.assert_close(torch.tensor(hybrid[0]), torch.tensor(flat[0]))


@ranks(2)
def test_an_engine_on_a_quantised_base_can_be_destroyed(rank, world_size):
    from test_quantized import build, wrapped

    net = build(wrapped)
    trained = [param for param in net.parameters() if param.requires_grad]
    before = net[0].weight.plain().clone()
    engine = deepspeed().initialize(model=net, model_parameters=trained, config=settings(2))[0]
    engine.backward(engine(torch.ones(2, 24)).square().mean())
    engine.destroy()
    assert torch.equal(net[0].weight.plain(), before)
    assert net(torch.ones(2, 24)).isfinite().all()
    with pytest.raises(CompatibilityError, match=r"'0.weight' is a \w+, which cannot have the attributes"):
        deepspeed().initialize(model=net, model_parameters=trained, config=settings(3))
