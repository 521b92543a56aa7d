"""Emitted files: shardwise reads from them what was planned, and so does DeepSpeed if it is installed."""

import json
import os
import subprocess

import pytest

import shardwise
from shardwise import ConfigError
from shardwise.compare.job import CompareRow, interpreter
from shardwise.config import Config
from shardwise.config.presets import PRESETS
from shardwise.planning import Hardware, Workload
from shardwise.planning.command import deepspeed_settings, emit
from shardwise.planning.search import search

READ = """
import json, sys
from deepspeed.runtime.config import DeepSpeedConfig
for settings in json.load(sys.stdin):
    config = DeepSpeedConfig(settings)
    zero = config.zero_config
    parts = (zero.offload_optimizer, zero.offload_param)
    tiers = [None if part is None else getattr(part.device, "value", part.device) for part in parts]
    print("read", json.dumps([
        int(zero.stage), config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps,
        config.gradient_clipping, config.optimizer_name, bool(config.bfloat16_config.enabled),
        bool(config.float16_config.enabled), *tiers,
    ]))
"""


@pytest.mark.parametrize("preset", list(PRESETS))
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_an_emitted_file_says_what_was_planned(preset, precision, checkpointing, tmp_path):
    workload = Workload(micro_batch=2, accumulation=3, precision=precision, checkpointing=checkpointing)
    foreseen = shardwise.plan("gpt2", workload=workload, presets=[preset])
    path = tmp_path / "config.json"
    emit(foreseen, path)
    loaded, planned = Config.load(path), workload.config(preset)
    for section in ("placement", "precision", "batch", "checkpointing", "gradients"):
        assert getattr(loaded, section) == getattr(planned, section)
    assert loaded.optimizer.name == planned.optimizer.name
    assert loaded.offload.nvme_path == planned.offload.nvme_path


def test_what_a_search_found_is_emitted_with_its_budget(tmp_path):
    hardware, workload = Hardware(2, 40 * 10**9, 10**12), Workload(accumulation=4)
    foreseen = shardwise.plan("llama3-8b", hardware=hardware, workload=workload)
    found = search(foreseen.model, workload, hardware)
    assert 0 < found[0].resident < 1
    emit(foreseen, tmp_path / "config.json", found)
    loaded = Config.load(tmp_path / "config.json")
    assert loaded.offload.device_memory == found[0].device_memory
    assert (loaded.batch.micro_batch_size, loaded.batch.accumulation) == (found[0].micro_batch, found[0].accumulation)
    assert loaded.placement == Config.load(found[0].preset).placement
    with pytest.raises(ConfigError, match="nothing fits"):
        emit(shardwise.plan("llama3-405b", hardware=hardware), tmp_path / "config.json", [])


def test_deepspeed_reads_what_was_planned():
    try:
        python = interpreter(CompareRow("zero1", "deepspeed"))
    except ConfigError as reason:
        pytest.skip(str(reason))
    wanted, emitted = [], []
    for preset, placement in PRESETS.items():
        for precision in ("bf16", "fp16", "fp32"):
            workload = Workload(micro_batch=2, accumulation=3, precision=precision)
            emitted.append(deepspeed_settings(workload, preset, device_memory=10**10))
            halves = [precision == "bf16", precision == "fp16"]
            tiers = [{"device": None, "host": "cpu", "disk": "nvme"}[part.tier]
                     for part in (placement.optim, placement.weights)]  # fmt: skip
            wanted.append([int(preset[4]), 2, 3, 1.0, "adamw", *halves, *tiers])
    done = subprocess.run(
        [python, "-c", READ],
        input=json.dumps(emitted),
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    seen = [json.loads(line.removeprefix("read ")) for line in done.stdout.splitlines() if line.startswith("read ")]
    assert seen == wanted
