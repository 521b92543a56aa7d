"""The recommendation: the order in which presets are tried, and its reason."""

import re

import pytest

import shardwise
from shardwise.planning import Hardware, Workload

GB = 10**9


def advice(model=None, gpus=8, gpu_bytes=80 * GB, workload=None, **more):
    named = {"model": model} if isinstance(model, str) else {"params": model}
    hardware = Hardware(gpus, gpu_bytes, **more)
    return shardwise.plan(**named, hardware=hardware, workload=workload or Workload()).advice


def test_from_fast_to_slow():
    presets = [advice(size * GB).preset for size in (1, 16, 24, 32)]
    assert presets == ["zero1", "zero2", "zero3", "zero3"]
    assert advice(70 * GB, host_bytes=2000 * GB).preset == "zero3_offload"
    assert advice(12 * GB, gpus=1, host_bytes=2000 * GB).preset == "zero1_offload"
    assert advice(20 * GB, gpus=1, host_bytes=2000 * GB).preset == "zero2_offload"
    assert advice(70 * GB, host_bytes=100 * GB, disk_bytes=GB).preset is None


def test_the_disk_is_the_last_resort():
    on_disk = advice("llama3-70b", 1, host_bytes=300 * GB, disk_bytes=10**13)
    assert on_disk.preset == "zero3_nvme"
    assert "zero3_offload: host memory too small" in on_disk.reason
    assert advice("llama3-70b", 1, host_bytes=2000 * GB, disk_bytes=10**13).preset == "zero3_offload"


def test_what_was_refused_before_it_is_the_reason():
    found = advice("llama3-8b", 5, 44 * GB)
    assert found.preset == "zero3"
    assert "zero2 needs" in found.reason
    assert "of 44GB" in found.reason


@pytest.mark.parametrize("gpus", [2, 8])
def test_a_small_model_is_not_worth_the_traffic_of_zero3(gpus):
    found = advice("gpt2", gpus)
    assert found.preset == "zero1"
    assert "zero3 would free" in found.reason
    assert "1.5 times as much" in found.reason
    assert re.search(r"MB more per GPU, [01]% of its memory", found.reason)


def test_one_gpu_has_nothing_to_shard():
    assert "nothing to shard" in advice("gpt2", 1).reason


def test_adapters_are_mentioned_where_states_would_leave_the_device_or_nothing_fits():
    offloaded = advice("llama3-70b", host_bytes=2000 * GB)
    assert offloaded.preset == "zero3_offload"
    assert "LoRA of rank 16 would fit under zero3" in offloaded.reason
    nothing = advice("llama3-70b", host_bytes=100 * GB, disk_bytes=100 * GB)
    assert nothing.preset is None
    assert "LoRA of rank 16 would fit under zero3" in nothing.reason
    assert "LoRA" not in advice("llama3-8b").reason
    assert "LoRA" not in advice("llama3-405b", host_bytes=100 * GB, disk_bytes=GB).reason  # does not fit either
    adapted = advice("qwen3-30b-a3b", 5, 44 * GB, Workload(lora=(16, ("q_proj", "v_proj"))))
    assert adapted.preset == "zero3"
    assert "would fit" not in adapted.reason
