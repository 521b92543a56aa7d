"""Keys that a DeepSpeed file leaves "auto": what the user's objects say or, with a warning, a default."""

import warnings

import pytest
import torch
from torch import nn

import shardwise
from shardwise.config import Config
from shardwise.config.auto import UserObjects
from shardwise.errors import ConfigError, ConfigWarning

USUAL = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 500, "initial_scale_power": 10},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000},
    "gradient_clipping": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def resolved(data, dtype=torch.float32, **options):
    """The configuration for a model of `dtype` and an AdamW(lr=1e-5) on it, and the warnings."""
    model = nn.Linear(4, 4, dtype=dtype)
    objects = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-5), **options}
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        config = Config.load(data).for_objects(UserObjects(**objects))
    return config, [str(each.message) for each in raised if each.category is ConfigWarning]


def train(config, optimizer=None, steps=1, dtype=torch.float32):
    model = nn.Linear(4, 4, dtype=dtype)
    if optimizer is not None:
        optimizer = optimizer(model.parameters())
    engine = shardwise.initialize(model, optimizer, config)
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 4)).float().mean())
        engine.step()
    return engine


@pytest.mark.filterwarnings("ignore::shardwise.errors.ConfigWarning")
def test_an_auto_schedule_ends_at_the_users_learning_rate():
    data = USUAL | {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 2}}}
    engine = train(data, lambda params: torch.optim.AdamW(params, lr=1e-5), steps=5)
    assert engine.lr_scheduler.get_last_lr() == [1e-5]
    engine.destroy()


def test_every_group_has_its_own_peak():
    weight, bias = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([{"params": [weight], "lr": 1e-5}, {"params": [bias], "lr": 1e-4}])
    config, _ = resolved(USUAL, optimizer=optimizer)
    assert config.scheduler.params["warmup_max_lr"] == (1e-5, 1e-4)


def test_auto_precision_is_that_of_the_model():
    assert resolved(USUAL, torch.bfloat16)[0].precision.compute == "bf16"
    half = resolved(USUAL, torch.float16)[0]
    assert half.precision.compute == "fp16"
    assert (half.precision.loss_scale.window, half.precision.loss_scale.initial) == (500, 1024)
    assert half.gradients.reduce_bucket_bytes == 2000  # elements of two bytes
    assert resolved(USUAL)[0].gradients.reduce_bucket_bytes == 4000
    assert half.origin("precision.compute").kind == "auto"


def test_the_engine_computes_in_the_models_dtype():
    with pytest.warns(ConfigWarning):
        engine = train(USUAL, lambda params: torch.optim.AdamW(params, lr=1e-5), dtype=torch.bfloat16)
    assert engine.config.precision.compute == "bf16"
    engine.destroy()


def test_a_precision_that_the_file_decides_is_not_the_models():
    assert resolved({"bf16": {"enabled": True}, "fp16": {"enabled": "auto"}})[0].precision.compute == "bf16"
    off = {"bf16": {"enabled": False}, "fp16": {"enabled": "auto"}}
    config, said = resolved(off, torch.bfloat16)
    assert config.precision.compute == "fp32"
    assert "fp16.enabled" in said[0]
    accelerate = {"distributed_type": "DEEPSPEED", "mixed_precision": "no", "deepspeed_config": {"bf16": off["fp16"]}}
    config, said = resolved(accelerate, torch.bfloat16)
    assert (config.precision.compute, said) == ("fp32", [])


def test_a_choice_that_the_file_cannot_have_is_an_error_only_when_it_is_made():
    data = {"fp16": {"enabled": "auto", "loss_scale_window": "many"}}
    assert resolved(data)[0].precision.compute == "fp32"
    with pytest.raises(ConfigError, match="loss_scale_window"):
        resolved(data, torch.float16)


def test_one_warning_per_key_that_nothing_says_with_the_value_taken():
    _, said = resolved(USUAL)
    expected = {
        "gradient_clipping": "no clipping is done",
        "gradient_accumulation_steps": "the default 1 is used",
        "scheduler.params.warmup_min_lr": "the default 0 is used",
        "scheduler.params.warmup_num_steps": "the default 1000 is used",
        "fp16.enabled and bf16.enabled": "the model is fp32, so fp32 is used",
    }
    assert len(said) == len(expected)
    for key, taken in expected.items():
        assert [line for line in said if f": {key} " in line and taken in line], (key, said)


def test_without_an_optimizer_the_defaults_taken_are_named():
    model = nn.Linear(2, 2)
    built = Config.load(USUAL).optimizer.build(model.parameters())
    _, said = resolved(USUAL, optimizer=built, is_own=False)
    assert any("optimizer.params.lr " in line and "0.001 is used" in line for line in said)
    assert any("optimizer.params.weight_decay " in line and "0 is used" in line for line in said)
    assert sum("optimizer.params" in line for line in said) == 4


def test_what_is_not_in_effect_warns_of_nothing():
    _, said = resolved(USUAL, torch.bfloat16, has_schedule=True)
    assert [line.split(": ")[1].split()[0] for line in said] == ["gradient_clipping", "gradient_accumulation_steps"]
    assert resolved(USUAL, torch.bfloat16, optimizer=None)[1] == []  # the engine only evaluates
    derived = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto"}
    assert resolved(derived)[1] == []


def test_initialize_warns_once_per_key_and_not_at_load():
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        config = Config.load(USUAL)
        assert not raised
        train(config, lambda params: torch.optim.AdamW(params, lr=1e-5)).destroy()
    said = [str(each.message) for each in raised if each.category is ConfigWarning]
    assert len(said) == 5
    assert len(set(said)) == 5


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "offload_param.device"),
        ({"zero_optimization": {"stage": 1, "offload_param": {"device": "nvme"}}}, "offload_param.device"),
        ({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer.device"),
        ({"aio": {"use_gds": True}}, "aio.use_gds"),
        (
            {"deepspeed_config": {"zero_stage": 2, "offload_param_device": "cpu"}},
            "deepspeed_config.offload_param_device",
        ),
    ],
)
def test_what_deepspeed_ignores_loads_with_a_warning(data, key):
    with pytest.warns(ConfigWarning, match=key + ".*no effect"):
        config = Config.load(data)
    assert {own.tier for _, own in config.placement} == {"device"}
