"""The recommendation: the order in which presets are tried, and its reason."""

import os
import re
from types import SimpleNamespace

import pytest

import shardwise
from shardwise.estimate.hardware import Rates, here
from shardwise.planning import Hardware, Workload

GB = 10**9


def advice(model=None, gpus=8, gpu_bytes=80 * GB, workload=None, **more):
    named = {"model": model} if isinstance(model, str) else {"params": model}
    hardware = Hardware(gpus, gpu_bytes, **more)
    return shardwise.plan(**named, hardware=hardware, workload=workload or Workload()).advice


def test_from_fast_to_slow():
    presets = [advice(size * GB).preset for size in (1, 16, 24, 31)]
    assert presets == ["zero1", "zero2", "zero3", "zero3"]
    assert advice(70 * GB, host_bytes=2000 * GB).preset == "zero3_offload"
    assert advice(12 * GB, gpus=1, host_bytes=2000 * GB).preset == "zero1_offload"
    assert advice(20 * GB, gpus=1, host_bytes=2000 * GB).preset == "zero2_offload"
    assert advice(70 * GB, host_bytes=100 * GB, disk_bytes=GB).preset is None


def test_on_several_nodes_weights_stay_in_the_node():
    nodes = {"gpus": 128, "nodes": 16}
    assert advice("llama3-70b", **nodes).preset == "zero3_hybrid"
    assert advice("llama3-8b", **nodes).preset == "zero1"
    # With several micro-batches, zero2 would send each of them out of the node, over a link that its GPUs share.
    small = {"gpus": 32, "nodes": 4, "gpu_bytes": 40 * GB, "rates": Rates(node_link=50e9)}
    assert advice("llama3-8b", **small).preset == "zero2"
    assert advice("llama3-8b", **small, workload=Workload(accumulation=4)).preset == "zero3_hybrid"
    assert advice("llama3-405b", gpus=512, nodes=64).preset == "zero3"


def test_traffic_in_a_node_and_out_of_it():
    made = shardwise.plan("llama3-8b", hardware=Hardware(16, nodes=2), workload=Workload(accumulation=4))
    psi, zero3, hybrid = made.model.trainable, made.row("zero3"), made.row("zero3_hybrid")
    assert zero3.outside_bytes == pytest.approx(3 * 4 * 2 * psi / 2)
    assert hybrid.outside_bytes == pytest.approx((4 + 2) * psi / 2)  # added up in fp32; new weights in bf16
    assert hybrid.wire_bytes == pytest.approx(3 * 4 * 2 * psi * 7 / 8 + hybrid.outside_bytes / 8)
    assert "out: leaves a node" in str(made)
    alone = shardwise.plan("llama3-8b", hardware=Hardware(16))
    assert "zero3_hybrid" not in [row.preset for row in alone.rows]
    assert {row.outside_bytes for row in alone.rows} == {0}


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


def test_each_row_says_whether_it_fits_and_with_how_much_to_spare():
    """132 GB of 150 GB fit, with less to spare than arithmetic may be off; the reason is a sentence."""
    found = shardwise.plan("llama3-8b", hardware=Hardware(1, 150 * GB))
    close = [row for row in found.rows if row.is_close]
    assert close
    assert all(0 <= row.margin < row.spare == 0.15 for row in close)
    text = str(found)
    assert "tight" not in text
    assert "<15% spare" in text
    assert "fits with less than 15% to spare" in text
    assert "the fastest that fits, with" in found.advice.reason
    assert re.search(r"zero\d needs \d+GB of 150GB, which leaves \d+% to spare", found.advice.reason)
    assert "arithmetic may be off by 15%; a dry run (--detailed) can tell" in found.advice.reason


def test_a_preset_that_needs_too_much_says_by_how_much():
    assert re.search(r"zero2 needs [\d.]+GB of 40GB, [\d.]+GB too much", advice("llama3-8b", 5, 40 * GB).reason)


def test_a_host_that_is_too_small_says_what_all_ranks_need_together():
    reason = advice("llama3-70b", 1, host_bytes=300 * GB, disk_bytes=10**13).reason
    assert re.search(r"host memory too small: [\d.]+[GT]B for the ranks of a node together, and it has 300GB", reason)


def test_dry_runs_are_not_forked_after_cuda_was_started(monkeypatch):
    def fork(*_):
        raise AssertionError("forked")

    monkeypatch.setattr("shardwise.planning.planner.cores", lambda: 8)
    monkeypatch.setattr("shardwise.planning.planner.ProcessPoolExecutor", fork)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    found = shardwise.plan("mlp-100k", detailed=True, presets=["zero1", "zero2"])
    assert found.mode == "detailed"
    assert any("torch's allocator will reserve about" in note for note in found.notes)
    assert not [note for note in found.notes if "no dry run" in note]


def test_this_machine_is_measured_in_another_process(monkeypatch):
    """So that CUDA does not start in the one that forks the dry runs."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=80 * GB))
    monkeypatch.setattr("shardwise.machine.env.hardware", lambda: {"memory_bytes": os.getpid()})
    monkeypatch.setattr("shardwise.machine.env.device_links_gbs", dict)
    monkeypatch.setattr("shardwise.machine.env.host_device_gbs", lambda: {"both at once": 50.0})
    found = here()
    assert (found.gpus, found.gpu_bytes) == (1, 80 * GB)
    assert found.host_bytes != os.getpid()
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    assert here().host_bytes == os.getpid()
