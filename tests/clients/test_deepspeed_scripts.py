"""What scripts that are written for DeepSpeed read beside the loop: optimizers, timers, settings, kernels by name."""

import importlib
import logging
import sys
import types
import warnings
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.compat import activation
from shardwise.errors import CompatibilityError
from support import ranks


def deepspeed():
    sys.path.insert(0, str(activation.FOLDER))
    return importlib.import_module("deepspeed")


def weights():
    return [nn.Parameter(torch.ones(3))]


def group(optimizer, *keys):
    return tuple(optimizer.param_groups[0][key] for key in keys)


def test_optimizers_take_their_arguments_in_deepspeeds_order(served):
    adam, lion = served.ops.adam, served.ops.lion
    # The fifth argument is the mode for the GPU's kernel, and the weight decay for the CPU's.
    fused = adam.FusedAdam(weights(), 1e-2, True, (0.8, 0.9), 1e-7, False, 0.1)
    assert group(fused, "lr", "betas", "eps", "weight_decay") == (1e-2, (0.8, 0.9), 1e-7, 0.1)
    assert not isinstance(fused, torch.optim.AdamW)
    assert not fused.adam_w_mode
    on_host = adam.DeepSpeedCPUAdam(weights(), 1e-2, True, (0.8, 0.9), 1e-7, 0.1, False, True, True)
    assert group(on_host, "weight_decay", "amsgrad") == (0.1, False)
    assert on_host.adam_w_mode
    assert group(adam.FusedAdam(weights()), "lr", "weight_decay") == (1e-3, 0.0)
    assert group(adam.DeepSpeedCPUAdam(weights(), amsgrad=True), "amsgrad") == (True,)
    uncorrected = adam.FusedAdam(weights(), 1e-2, False)
    assert type(uncorrected).__name__ == "UncorrectedAdam"
    for kind in (lion.DeepSpeedCPULion, lion.FusedLion):
        assert group(kind(weights()), "lr", "betas") == (1e-3, (0.9, 0.999))
    assert group(lion.FusedLion(weights(), 1e-2, (0.8, 0.9), 0.1), "lr", "betas", "weight_decay") == (
        1e-2,
        (0.8, 0.9),
        0.1,
    )
    adagrad = served.ops.adagrad.DeepSpeedCPUAdagrad(weights(), 1e-2, 1e-9, 0.1, False)
    assert group(adagrad, "lr", "eps", "weight_decay") == (1e-2, 1e-9, 0.1)


def test_scripts_that_ask_for_a_kernel_hear_whether_it_is_there(served):
    builders, there = served.ops.op_builder, served.ops.__compatible_ops__
    assert there[builders.CPUAdamBuilder.NAME]
    assert builders.CPUAdamBuilder().is_compatible()
    assert not there[builders.QuantizerBuilder.NAME]
    assert not builders.QuantizerBuilder().is_compatible()
    with pytest.raises(CompatibilityError, match="'quantizer' is not there: use torch's own operators"):
        builders.QuantizerBuilder().load()
    with pytest.raises(CompatibilityError, match="torch's own operators"):
        importlib.import_module("deepspeed.ops.adam.fused_adam").multi_tensor_applier()
    with pytest.raises(CompatibilityError, match=r"deepspeed\.replace_transformer_layer is not served"):
        served.replace_transformer_layer(model=nn.Linear(2, 2))


def test_checkpointing_passes_names_and_has_one_random_stream(served):
    checkpointing = served.checkpointing
    value, scale = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
    checkpointing.checkpoint(lambda x, *, scale: x * scale, value, scale=scale).sum().backward()
    assert torch.equal(value.grad, scale)
    checkpointing.model_parallel_cuda_manual_seed(7)
    tracker = checkpointing.get_cuda_rng_tracker()
    tracker.add("model-parallel-rng", 7)
    with tracker.fork():
        drawn = torch.rand(3)
    tracker.set_states(tracker.get_states())
    tracker.reset()
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), drawn)


def test_timers_add_up_what_they_measure(served, capsys):
    timers = importlib.import_module("deepspeed.utils.timer").SynchronizedWallClockTimer()
    timer = timers("step")
    for _ in range(2):
        timer.start()
        timer.stop()
    first, second = timer.records
    assert (timer.elapsed(reset=False), timer.mean()) == (first + second, (first + second) / 2)
    assert timers.get_mean(["step", "other"], normalizer=2) == {"step": timer.mean() / 2}
    served.utils.logger.setLevel(logging.INFO)
    timers.log(["step"])
    assert "time (ms) | step: " in capsys.readouterr().out
    assert timer.elapsed() == 0
    timer.start()
    assert timer.elapsed() > 0  # of a timer that goes on
    timer.stop()
    assert timers.has_timer("step")
    assert timers.get_timers() == {"step": timer}
    with pytest.raises(AssertionError, match="step timer is not started"):
        timer.stop()
    timer.start()
    with pytest.raises(AssertionError, match="step timer has already been started"):
        timer.start()


def test_small_functions_work_without_an_engine(served):
    utils = importlib.import_module("deepspeed.runtime.utils")
    moved = utils.move_to_device({"a": [torch.ones(2), 3]}, "meta")
    assert moved["a"][0].is_meta
    assert moved["a"][1] == 3
    kept = utils.move_to_device([torch.ones(2), torch.ones(3)], "meta", lambda tensor: tensor.numel() == 3)
    assert [tensor.is_meta for tensor in kept] == [False, True]
    assert utils.required_torch_version(min_version=2.1)
    helper = importlib.import_module("deepspeed.compression.helper")
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    helper.recursive_setattr(net, "0.0", nn.Identity())
    assert isinstance(helper.recursive_getattr(net, "0.0"), nn.Identity)
    helper.recursive_setattr(net, "name", "net")
    assert net.name == "net"


def test_a_configuration_answers_for_keys_that_are_not_in_it(served):
    config = served.DeepSpeedConfig({"train_batch_size": 4, "progressive_layer_drop": {"enabled": True}})
    assert (config.pld_enabled, config.eigenvalue_enabled, config.amp_enabled) == (True, False, False)
    assert (config.dump_state, config.log_level, config.zero_force_ds_cpu_optimizer) == (False, None, True)
    assert (config.steps_per_print, config.gradient_clipping) == (10, 0.0)


def test_gradients_are_not_cut_into_tiny_pieces():
    from shardwise.compat.engine.initialize import read_config

    for given, bound_bytes in [(20, 4 << 16), (1 << 20, 4 << 20), (float("inf"), None)]:
        config = {"train_batch_size": 1, "zero_optimization": {"stage": 2, "reduce_bucket_size": given}}
        settings, parsed = read_config(config)
        assert settings["zero_optimization"]["reduce_bucket_size"] == given
        assert parsed.gradients.reduce_bucket_bytes == bound_bytes


@ranks(2)
def test_engines_show_their_settings_as_an_object(rank, world_size):
    ds, net = deepspeed(), nn.Linear(8, 8)
    ds.utils.logger.setLevel(logging.DEBUG)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "log_level": "ERROR",
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "adam_w_mode": False}},
        "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 7},
    }
    mpu = types.SimpleNamespace(get_model_parallel_world_size=lambda: 1)
    engine, optimizer, *_ = ds.initialize(model=net, model_parameters=net.parameters(), config=config, mpu=mpu)
    assert engine.mpu is mpu
    assert ds.utils.logger.getEffectiveLevel() == logging.ERROR
    assert (engine.log_level(), engine.amp_enabled(), engine.communication_data_type()) == ("ERROR", False, None)
    seen = engine._config
    assert (seen.train_batch_size, seen.train_micro_batch_size_per_gpu, seen.gradient_accumulation_steps) == (8, 2, 2)
    assert (seen.gradient_clipping, seen.zero_config.max_live_parameters) == (0.5, 7)
    engine.set_train_batch_size(16)
    assert (engine._config.train_batch_size, engine._config.gradient_accumulation_steps) == (16, 4)
    assert not optimizer.optimizer.adam_w_mode
    for _ in range(4):
        engine.backward(engine(torch.ones(2, 8)).mean())
        engine.step()
    engine.tput_timer.update_epoch_count()
    assert engine.tput_timer.epoch_count == 1
    optimizer._set_fp32_optimizer_param_groups()
    assert {key for state in optimizer.state_dict()["state"].values() for key in state} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }
    optimizer._clear_fp32_optimizer_param_groups()


@ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_norm_of_a_step_is_found_by_the_name_that_scripts_read(rank, world_size, stage):
    ds, net = deepspeed(), nn.Linear(8, 8)
    config = {"train_batch_size": 4, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    config["optimizer"] = {"type": "Adam", "params": {"lr": 0.0}}
    engine, optimizer, *_ = ds.initialize(model=net, model_parameters=net.parameters(), config=config)

    def train():
        engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)).float().mean())
        engine.step()

    train()
    assert float(engine._global_grad_norm) == float(optimizer._global_grad_norm) > 0
    if stage != 3:
        net.weight.data.fill_(0.5)
    else:
        with ds.zero.GatheredParameters(net.weight, modifier_rank=0):
            net.weight.data.fill_(0.5)
    optimizer.refresh_fp32_params()
    train()
    assert torch.equal(ds.utils.safe_get_full_fp32_param(net.weight), torch.full((8, 8), 0.5))


@ranks(2)
def test_losses_and_rates_of_steps_are_written_where_the_configuration_says(rank, world_size, tmp_path):
    ds, net = deepspeed(), nn.Linear(8, 8)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "fp16": {"enabled": True, "loss_scale": 8.0},
        "optimizer": {"type": "Adam", "params": {"lr": 0.0}},
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"},
        "tensorboard": {"enabled": False},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine, *_ = ds.initialize(model=net, model_parameters=net.parameters(), config=config)
    assert engine.monitor.enabled
    assert (engine.monitor.csv_monitor is None) == (rank == 1)
    assert engine.monitor.tb_monitor is None
    losses = []
    for _ in range(4):
        loss = engine(torch.ones(2, 8, dtype=torch.half)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    dist.barrier()
    written = {path.name: path.read_text().splitlines() for path in (tmp_path / "job").iterdir()}
    assert written["Train_Samples_lr.csv"] == ["step,lr", "8,0.0", "16,0.0"]
    assert written["Train_Samples_loss_scale.csv"] == ["step,loss_scale", "8,8.0", "16,8.0"]
    head, *rows = written["Train_Samples_train_loss.csv"]
    assert head == "step,train_loss"
    assert [row.split(",")[0] for row in rows] == ["0", "8"]
    if rank == 0:
        assert float(rows[0].split(",")[1]) == pytest.approx(sum(losses[:2]) / 2)
    dist.barrier()
    engine.monitor.write_events([("Train/Samples/lr", 0.5, 24)])
    dist.barrier()
    lines = (tmp_path / "job" / "Train_Samples_lr.csv").read_text().splitlines()
    assert lines[-1] == "24,0.5"


def test_monitors_call_the_packages_of_their_services(served, monkeypatch):
    monitors = importlib.import_module("deepspeed.monitor.monitor")
    config = importlib.import_module("deepspeed.monitor.config")
    packages = {name: Mock() for name in ("torch.utils.tensorboard", "wandb", "comet_ml", "trackio")}
    for name, package in packages.items():
        monkeypatch.setitem(sys.modules, name, package)
    enabled = {
        "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "job"},
        "wandb": {"enabled": True, "group": "group", "team": "team"},
        "comet": {"enabled": True, "samples_log_interval": 4, "experiment_name": "mine"},
        "trackio": {"enabled": True, "project": "mine"},
    }
    master = monitors.MonitorMaster(config.get_monitor_config(enabled))
    master.write_events([("Train/loss", 0.5, 1), ("Train/loss", 0.25, 2)])
    board, wandb, comet, trackio = packages.values()
    board.SummaryWriter.assert_called_once_with(log_dir="logs/job")
    board.SummaryWriter().add_scalar.assert_called_with("Train/loss", 0.25, 2)
    wandb.init.assert_called_once_with(project="deepspeed", group="group", entity="team")
    wandb.log.assert_called_with({"Train/loss": 0.25}, step=2, commit=None)
    assert comet.start.call_args.kwargs["online"] is None
    comet.start().set_name.assert_called_once_with("mine")
    comet.start().log_metric.assert_called_once_with("Train/loss", 0.5, step=1)
    trackio.init.assert_called_once_with(project="mine")
    trackio.log.assert_called_with({"Train/loss": 0.25}, step=2)
    nothing = monitors.MonitorMaster(config.DeepSpeedMonitorConfig())
    assert (nothing.enabled, nothing.wandb_monitor) == (False, None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(CompatibilityError, match="WandbMonitor needs the package wandb: install it"):
        monitors.WandbMonitor(types.SimpleNamespace(enabled=True))
