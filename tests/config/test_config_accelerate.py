"""Accelerate's YAML, with the DeepSpeed keys in it, beside it, or in a file that it names."""

import base64
import json
from textwrap import dedent

import pytest

from shardwise.config import PRESETS, Config
from shardwise.errors import ConfigError

NESTED = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  gradient_accumulation_steps: 1
  zero3_init_flag: true
  zero_optimization:
    stage: 3
    stage3_prefetch_bucket_size: 500000
    stage3_param_persistence_threshold: 10000
    stage3_max_live_parameters: 10000000
    reduce_bucket_size: 500000
mixed_precision: fp16
num_processes: 2
num_machines: 1
use_cpu: false
"""


def write(folder, text, name="accelerate.yaml"):
    path = folder / name
    path.write_text(dedent(text))
    return path


def test_zero_optimization_nested_in_deepspeed_config(tmp_path):
    config = Config.load(write(tmp_path, NESTED))
    assert config.placement == PRESETS["zero3"]
    assert config.precision.compute == "fp16"
    assert config.runtime.prefetch_bytes == 1_000_000
    assert config.runtime.max_gathered_bytes == 20_000_000
    assert config.gradients.reduce_bucket_bytes == 1_000_000
    assert config.origin("precision.compute").detail == "mixed_precision"
    assert "deepspeed_config.zero_optimization" in config.explain()


@pytest.mark.parametrize(
    ("stage", "param", "optimizer", "preset"),
    [(0, "none", "none", "zero0"), (2, "none", "cpu", "zero2_offload"), (3, "cpu", "cpu", "zero3_offload")],
)
def test_flat_keys(stage, param, optimizer, preset):
    section = {"zero_stage": stage, "offload_param_device": param, "offload_optimizer_device": optimizer}
    config = Config.load({"distributed_type": "DEEPSPEED", "deepspeed_config": section, "mixed_precision": "bf16"})
    assert config.placement == PRESETS[preset]
    assert config.precision.compute == "bf16"


def test_a_bare_no_is_no_mixed_precision(tmp_path):
    text = "distributed_type: DEEPSPEED\nmixed_precision: no\ndeepspeed_config: {zero_stage: 1}\n"
    assert Config.load(write(tmp_path, text)).precision.compute == "fp32"


def test_the_flag_of_old_files():
    config = Config.load({"distributed_type": "DEEPSPEED", "fp16": True, "deepspeed_config": {"zero_stage": 2}})
    assert config.precision.compute == "fp16"


FILE = {
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    "bf16": {"enabled": "auto"},
    "gradient_clipping": 1.0,
}


def test_a_named_file_is_read_from_the_yamls_folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "ds.json").write_text(json.dumps(FILE))
    path = write(tmp_path, "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: sub/ds.json}\n")
    config = Config.load(path)
    assert config.placement == PRESETS["zero2"]
    assert config.gradients.clip_norm == 1.0


@pytest.mark.parametrize("encode", [str, lambda text: base64.b64encode(text.encode()).decode()])
def test_the_file_may_be_json_or_base64(encode):
    section = {"deepspeed_config_file": encode(json.dumps(FILE))}
    config = Config.load({"distributed_type": "DEEPSPEED", "deepspeed_config": section, "mixed_precision": "bf16"})
    assert config.placement == PRESETS["zero2"]
    assert config.precision.compute == "bf16"  # fills the file's "auto"


def ds(section=None, **keys):
    return {"distributed_type": "DEEPSPEED", "deepspeed_config": section or {}, **keys}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"distributed_type": "FSDP"}, r"distributed_type = 'FSDP': expected DEEPSPEED"),
        (ds(mixed_precision="fp8"), r"mixed_precision = 'fp8': asks for fp8"),
        (
            ds(mixed_precison="fp16"),
            r"mixed_precison = 'fp16': unknown key of Accelerate; did you mean 'mixed_precision'",
        ),
        (
            ds({"zero_stag": 3}),
            r"deepspeed_config\.zero_stag = 3: unknown key of deepspeed_config; did you mean 'zero_stage'",
        ),
        (ds({"zero_stage": 7}), r"deepspeed_config\.zero_stage = 7: expected a stage from 0 to 3"),
        (ds({"zero_stage": 3, "offload_param_device": "nvme"}), r"nvme_path = null: device nvme needs the path"),
        (ds({"zero_stage": 3, "zero_optimization": {"stage": 2}}), r"contradicts zero_optimization\.stage = 3"),
        (
            ds({"bf16": {"enabled": True}}, mixed_precision="fp16"),
            r"mixed_precision = 'fp16': contradicts bf16\.enabled = true",
        ),
        (ds({"deepspeed_config_file": "gone.json"}), r"deepspeed_config_file = 'gone\.json': no such file"),
        (ds(num_processes=0), r"num_processes = 0: expected a whole number >= 1"),
        (
            ds(
                {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1},
                num_processes=2,
            ),
            r"num_processes = 2: the batch triple does not multiply",
        ),
        (ds(fsdp_config={"fsdp_sharding_strategy": "FULL_SHARD"}), r"fsdp_config = .*asks for FSDP"),
        (ds(parallelism_config={"parallelism_config_tp_size": 2}), r"tp_size = 2: asks for tensor parallelism"),
    ],
)
def test_bad_input_names_key_value_and_remedy(config, message):
    with pytest.raises(ConfigError, match=message):
        Config.load(config)
