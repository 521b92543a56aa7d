"""DeepSpeed's JSON: every ZeRO key, its odd but normal inputs, deprecated spellings, refusals and slips."""

import math
import warnings

import pytest

from shardwise.config import Config
from shardwise.config.sections import Batch
from shardwise.errors import ConfigError, ConfigWarning


def load(**keys):
    return Config.load(keys)


def zero(stage=3, **keys):
    return Config.load({"zero_optimization": {"stage": stage, **keys}})


def test_buckets_are_elements_there_and_bytes_here():
    keys = {"reduce_bucket_size": 5e8, "allgather_bucket_size": 2e8}
    half = Config.load({"zero_optimization": {"stage": 2, **keys}, "bf16": {"enabled": True}})
    assert half.gradients.reduce_bucket_bytes == 10**9
    assert half.runtime.gather_bucket_bytes == 4 * 10**8
    assert zero(2, **keys).gradients.reduce_bucket_bytes == 2 * 10**9


def test_stage3_bounds_and_their_unprefixed_aliases():
    prefixed = zero(stage3_prefetch_bucket_size=1000, stage3_max_live_parameters=1e9)
    bare = zero(prefetch_bucket_size=1000, max_live_parameters=1e9)
    assert prefixed == bare
    assert prefixed.runtime.prefetch_bytes == 4000
    assert prefixed.runtime.max_gathered_bytes == 4 * 10**9
    assert zero(max_live_parameters=0, max_reuse_distance=0, sub_group_size=0).runtime.max_gathered_bytes == 0
    with pytest.raises(ConfigError, match="contradicts stage3_max_live_parameters"):
        zero(stage3_max_live_parameters=1, max_live_parameters=2)


@pytest.mark.parametrize("value", [math.inf, "inf", "auto", None])
def test_no_bound(value):
    assert zero(2, reduce_bucket_size=value).gradients.reduce_bucket_bytes is None


@pytest.mark.parametrize("value", [500_000_000, 5e8, "5e8", "500_000_000"])
def test_whole_numbers_in_any_spelling(value):
    assert zero(2, reduce_bucket_size=value).gradients.reduce_bucket_bytes == 2 * 10**9


@pytest.mark.parametrize(
    ("param", "optimizer", "placements"),
    [
        ("none", "none", ("device", "device", "device")),
        ("none", "cpu", ("device", "host", "host")),
        ("cpu", "none", ("host", "device", "device")),
        ("cpu", "cpu", ("host", "host", "host")),
        ("nvme", "cpu", ("disk", "host", "host")),
        ("nvme", "nvme", ("disk", "host", "disk")),
        ("auto", None, ("device", "device", "device")),
    ],
)
def test_offload_devices_are_tiers(param, optimizer, placements):
    placement = zero(
        offload_param={"device": param, "nvme_path": "/nvme", "pin_memory": True},
        offload_optimizer={"device": optimizer, "nvme_path": "/nvme"},
    ).placement
    assert (placement.weights.tier, placement.grads.tier, placement.optim.tier) == placements


def test_offload_settings():
    offload = zero(
        offload_param={"device": "nvme", "nvme_path": "/a", "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9},
        offload_optimizer={"device": "nvme", "nvme_path": "/b", "buffer_count": 4, "pin_memory": False, "ratio": 0.3},
        aio={"block_size": 262144, "queue_depth": 16, "thread_count": 2, "single_submit": False},
    ).offload
    assert (offload.weights_nvme_path, offload.nvme_path) == ("/a", "/b")
    assert (offload.buffer_count, offload.buffer_bytes) == (5, 4 * 10**8)
    assert (offload.pin_memory, offload.ratio) == (False, 0.3)
    assert (offload.aio.block_bytes, offload.aio.queue_depth, offload.aio.threads) == (262144, 16, 2)


def test_fp16_and_its_loss_scale():
    section = {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 4}
    precision = load(fp16=section | {"min_loss_scale": 2, "auto_cast": True}).precision
    scale = precision.loss_scale
    assert (precision.compute, precision.cast_inputs) == ("fp16", True)
    assert (scale.dynamic, scale.initial, scale.window, scale.hysteresis, scale.minimum) == (True, 4096, 500, 4, 2)
    static = load(fp16=section | {"loss_scale": 128}).precision.loss_scale
    assert (static.dynamic, static.initial) == (False, 128)
    off = load(fp16={**section, "enabled": False}, bf16={"enabled": True, "loss_scale": 0, "hysteresis": 3}).precision
    assert off.compute == "bf16"
    assert off.loss_scale.hysteresis == 2


def test_other_precision_keys():
    config = load(communication_data_type="fp32", data_types={"grad_accum_dtype": "bfloat16"}, bf16={"enabled": "true"})
    assert config.precision.reduce_dtype == "fp32"
    assert config.precision.accumulate_dtype == "bf16"
    autocast = load(torch_autocast={"enabled": True, "dtype": "torch.bfloat16"}).precision
    assert (autocast.autocast, autocast.compute, autocast.weights_dtype) == (True, "bf16", "fp32")


def test_clipping_batch_and_printing():
    config = load(
        train_batch_size=32,
        train_micro_batch_size_per_gpu=4,
        gradient_clipping=1,
        steps_per_print=math.inf,
        wall_clock_breakdown=True,
    )
    assert config.gradients.clip_norm == 1.0
    assert config.runtime.steps_per_print is None
    assert config.runtime.timers
    assert config.batch.resolve(2) == Batch(micro_batch_size=4, accumulation=4, global_batch_size=32)
    assert load(gradient_clipping=0).gradients.clip_norm is None


def test_deepspeeds_adam_is_adamw_without_decay_unless_told_otherwise():
    def optimizer(**params):
        return load(optimizer={"type": "Adam", "params": params}).optimizer

    assert optimizer(lr=1e-3).name == "AdamW"
    # DeepSpeed builds torch's AdamW then, with torch's default of weight_decay, 0.01.
    assert optimizer(lr="1e-3", torch_adam=True).params == {"lr": 1e-3}
    assert optimizer(lr="1e-3", torch_adam=False).params == {"lr": 1e-3, "weight_decay": 0.0}
    assert optimizer(adam_w_mode=False, weight_decay=0.1).name == "Adam"
    assert optimizer(lr="auto", betas=[0.8, 0.99]).params == {"betas": (0.8, 0.99), "weight_decay": 0.0}
    assert load(optimizer={"type": "Lion", "params": {}}).optimizer.params == {"lr": 1e-3, "betas": (0.9, 0.999)}
    assert load(optimizer={"type": "Lion", "params": {"lr": 1e-4}}).optimizer.params["lr"] == 1e-4


def test_scheduler_names_and_left_open_values():
    config = load(
        optimizer={"type": "AdamW", "params": {"lr": 2e-5}},
        scheduler={
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": "auto", "total_num_steps": "auto", "warmup_num_steps": 10},
        },
    )
    assert config.scheduler.params == {"warmup_max_lr": 2e-5, "warmup_num_steps": 10}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, "cpu_offload: is deprecated, use offload_optimizer"),
        ({"bfloat16": {"enabled": True}}, "bfloat16: is deprecated, use bf16"),
        (
            {"zero_optimization": {"stage3_gather_fp16_weights_on_model_save": True}},
            "gather_fp16.* is deprecated, use stage3_gather_16bit",
        ),
        ({"zero_optimization": True}, "zero_optimization: is deprecated as a flag"),
        ({"fp16": {"enabled": True}, "_comment": "x"}, "_comment: unknown key, ignored as DeepSpeed does"),
        ({"fp16": {"enabled": True}, "log": {}}, "log: unknown key"),
        (
            {"zero_optimisation": {}, "train_batch_size": 8},
            "zero_optimisation: unknown key.*did you mean 'zero_optimization'",
        ),
        ({"gradient_clipping": 1, "gradient_accumulation_steps ": 4}, "did you mean 'gradient_accumulation_steps'"),
        ({"tensorboard": {"enabled": True}, "bf16": {"enabled": True}}, "tensorboard: no effect"),
        ({"checkpoint": {"use_node_local_storage": True}}, "use_node_local_storage: no effect"),
        ({"bf16": {"enabled": True}, "sparse_gradients": True}, "sparse_gradients: no effect"),
    ],
)
def test_warnings_name_the_key(config, words):
    with pytest.warns(ConfigWarning, match=words):
        Config.load(config)


def test_sections_of_both_dialects_that_are_null_tell_nothing():
    assert load(optimizer=None, scheduler=None, fp16={"enabled": True}).precision.compute == "fp16"
    assert Config.load({"optimizer": None}) == Config()


def test_deprecated_spellings_mean_the_same():
    with pytest.warns(ConfigWarning):
        old = zero(2, cpu_offload=True, cpu_offload_use_pin_memory=False)
    assert old == zero(2, offload_optimizer={"device": "cpu", "pin_memory": False})


def test_a_usual_file_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(zero_optimization={"stage": 3, "overlap_comm": True, "sub_group_size": 1e9}, steps_per_print=1e5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimization": {"stage": 4}}, r"zero_optimization\.stage = 4: expected a stage from 0 to 3"),
        ({"zero_optimization": {"stage": -1}}, r"zero_optimization\.stage = -1: .*not a negative"),
        ({"zero_optimization": {"stage": 1.5}}, r"zero_optimization\.stage = 1\.5: .*not a fraction"),
        ({"zero_optimization": {"stage": True}}, r"zero_optimization\.stage = true: expected a whole number"),
        ({"zero_optimization": []}, r"zero_optimization = \[\]: expected a section"),
        (
            {"zero_optimization": {"overlap_com": True}},
            r"zero_optimization\.overlap_com = true: unknown key; did you mean 'overlap_comm'\?",
        ),
        ({"zero_optimization": {"reduce_bucket_size": -1}}, r"reduce_bucket_size = -1: .*not a negative"),
        ({"zero_optimization": {"reduce_bucket_size": 0.5}}, r"reduce_bucket_size = 0\.5: .*not a fraction"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "gpu"}}},
            r"offload_param\.device = 'gpu': expected none, cpu or nvme",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
            r"zero_optimization\.offload_optimizer\.nvme_path = null: device nvme needs the path of a folder",
        ),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"devise": "cpu"}}}, r"offload_optimizer\.devise"),
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            r"bf16\.enabled = true: fp16\.enabled is true as well",
        ),
        ({"fp16": {"enabled": True, "los_scale": 1}}, r"fp16\.los_scale = 1: unknown key; did you mean 'loss_scale"),
        ({"fp16": {"enabled": "perhaps"}}, r"fp16\.enabled = 'perhaps': expected true or false"),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 999}},
            r"initial_scale_power = 999: expected a power of two up to 64",
        ),
        (
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3},
            r"global_batch_size 8 is no multiple .*train_batch_size",
        ),
        ({"train_batch_size": 0}, r"train_batch_size = 0: Input should be greater than or equal to 1"),
        ({"gradient_clipping": -1}, r"gradient_clipping = -1: expected a norm >= 0"),
        ({"gradient_clipping": "much"}, r"gradient_clipping = 'much': expected a finite number"),
        ({"communication_data_type": "int8"}, r"communication_data_type = 'int8': expected fp32"),
        ({"optimizer": {"type": "Lamb"}}, r"optimizer\.type = 'Lamb': asks for LAMB"),
        ({"optimizer": {"type": "AdamX"}}, r"optimizer: name 'AdamX': neither Lion nor a name of torch\.optim"),
        ({"optimizer": {"params": {}}}, r"optimizer\.type = null: expected a text"),
        ({"optimizer": {"type": "Adam", "param": {}}}, r"optimizer\.param = {}: unknown key, expected type, params"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup": 3}}},
            r"params\.warmup: unknown key of WarmupLR; did you mean",
        ),
        ({"aio": {"block_sise": 1}}, r"aio\.block_sise = 1: unknown key; did you mean 'block_size'"),
        ({"sparse_attention": {"mode": "fixed", "block": 16}}, r"sparse_attention = .*asks for sparse attention"),
        (
            {"bf16": {"enabled": True, "check_grad_overflow": True}},
            r"check_grad_overflow = true: asks for skipping steps",
        ),
        ({"gradient_allreduce_op": "sum"}, r"gradient_allreduce_op = 'sum': .* averaged .* multiply the loss"),
        ({"managed_gradient_accumulation": False}, r"managed_gradient_accumulation = false: .*set_boundary"),
        ({"activation_checkpointing": {"partition": 1}}, r"activation_checkpointing\.partition = 1: unknown key"),
    ],
)
def test_bad_input_names_key_value_and_remedy(config, message):
    with pytest.raises(ConfigError, match=message):
        Config.load(config)


@pytest.mark.parametrize(
    "block",
    [
        {
            "compression_training": {
                "weight_quantization": {"shared_parameters": {"enabled": False}, "different_groups": {"a": [1]}}
            }
        },
        {"amp": {"enabled": "auto", "opt_level": "auto"}},
        {"tensor_parallel": {"autotp_size": 1}},
        {"sequence_parallel_size": 1},
        {"elasticity": {"enabled": False, "max_train_batch_size": 2000}},
        {"compile": {"disable": False, "backend": "inductor"}},
        {"gradient_allreduce_op": "mean", "managed_gradient_accumulation": True},
        {
            "zero_optimization": {
                "stage": 3,
                "stage3_adaptive_prefetch_bucket_size": True,
                "partition_stream_chunk_size": 8,
            }
        },
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "convert_grad_on_cpu": False}}},
        {"zero_optimization": {"zero_quantized_weights": False, "zero_hpz_partition_size": 1, "mics_shard_size": -1}},
    ],
)
def test_a_feature_that_is_off_is_no_obstacle(block):
    assert Config.load(block)._provenance.notes
