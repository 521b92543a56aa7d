"""The search: what fits, best first; what stays on the device; the model of time that ranks."""

import json
import re

import pytest

import shardwise
from shardwise.dry_run.dry_run import foresee_workload
from shardwise.estimate.arithmetic import moved_bytes, operations, wire_s
from shardwise.estimate.hardware import Rates
from shardwise.models.catalog import find
from shardwise.models.dimensions import Dimensions
from shardwise.models.workload import from_dimensions, from_parameters
from shardwise.planning import Hardware, Workload
from shardwise.planning.search import COUNT, search, why

GB = 10**9
SMALL = Dimensions("small", 512, 2, 4, 4000, 1024)


def test_the_search_ranks_what_fits():
    found = search(from_parameters(30 * GB), Workload(accumulation=8), Hardware(8, 80 * GB))
    assert found
    assert found[0].preset == "zero3"
    assert found[0].micro_batch == 8  # fewer gathers per sample
    assert [each.cost for each in found] == sorted(each.cost for each in found)
    assert search(from_parameters(1000 * GB), Workload(), Hardware(2, 80 * GB)) == []


def test_nothing_is_recomputed_that_need_not_be():
    found = search(from_dimensions(find("gpt2"), None), Workload(accumulation=4), Hardware(8, 80 * GB))
    assert found[0].preset == "zero1"
    assert not found[0].checkpointing


def test_as_many_states_stay_as_fit():
    model, workload = from_dimensions(find("llama3-8b"), None), Workload()
    shares = []
    for gpu_bytes in (44 * GB, 60 * GB, 70 * GB):
        best = next(each for each in search(model, workload, Hardware(2, gpu_bytes, 10**12)) if each.tp == 1)
        assert best.peak_bytes <= 0.85 * gpu_bytes
        assert best.device_memory == int(0.85 * gpu_bytes) - Hardware(2, gpu_bytes).reserved_bytes
        shares.append(best.resident)
    assert 0 < shares[0] < shares[1] < shares[2] < 1


def test_a_frozen_model_leaves_though_the_states_of_its_adapters_could_stay():
    workload, hardware = Workload(micro_batch=2, lora=(16, ("q_proj", "v_proj"))), Hardware(1, 24 * GB, 64 * GB)
    foreseen = shardwise.plan("llama3-8b", hardware=hardware, workload=workload)
    assert foreseen.advice.preset == "zero3_offload"
    found = search(foreseen.model, workload, hardware)[:COUNT]
    assert found[0].preset == "zero3_offload"
    assert found[0].moved_bytes_per_sample > 16 * GB  # two samples share two copies of the weights
    assert {each.preset for each in found} == {"zero3_offload", "zero3_nvme"}  # not zero2_offload, where nothing leaves


def test_the_slower_link_is_spared():
    model = from_dimensions(find("llama3-8b"), None)

    def best(**rates):
        return search(model, Workload(accumulation=4), Hardware(5, 44 * GB, 10**12, rates=Rates(**rates)))[0].preset

    assert best(host_link=1e9) == "zero3"
    assert best(gpu_link=1e9) in ("zero1_offload", "zero2_offload")  # which send the same with one micro-batch


def test_a_node_that_can_cut_the_model_is_searched_too():
    model, on = from_dimensions(find("llama3-70b"), None), Hardware(128, nodes=16)
    found = search(model, Workload(), on)
    # Without recomputation and with a part of the states on the host; the fastest that leaves them all on the device.
    assert (found[0].preset, found[0].tp, found[0].checkpointing) == ("zero3_offload", 1, False)
    assert next(each for each in found if "offload" not in each.preset).preset == "zero3_hybrid"
    assert {each.tp for each in found} == {1, 2, 4, 8}
    assert {each.micro_batch * each.accumulation / each.tp for each in found} == {1}  # as many samples a step
    assert not [each for each in found if (each.tp, each.preset) == (8, "zero3_hybrid")]  # a node is one rank of ZeRO
    assert re.match(
        r"→ zero3_offload; zero3_hybrid with recomputation would take 1\.\d+ times as long, and send "
        r"0\.96 times as much, and 0\.67 times as much out of a node; "
        r"with tp 2, the layers of each GPU would wait for [\d.]+GB of activations in a step",
        why(found, Workload()),
    )
    given = search(model, Workload(tp=4), on)
    assert {each.tp for each in given} == {4}
    # Where GPUs of one node are too small even for zero3, a copy on several of them still fits.
    small = search(model, Workload(sequence=8192), Hardware(64, 30_500_000_000, nodes=8))
    assert small[0].tp == 8
    assert why(small, Workload()).endswith("nothing fits with less tp")
    assert {each.tp for each in search(from_dimensions(find("qwen3-30b-a3b"), None), Workload(), on)} == {1}


@pytest.mark.parametrize("host_bytes", [None, 10**12, 900 * 10**9])
def test_table_and_search_judge_the_host_alike(host_bytes):
    hardware = Hardware(8, 80 * GB, host_bytes, disk_bytes=GB)
    foreseen = shardwise.plan("llama3-70b", hardware=hardware)
    found = [each for each in search(foreseen.model, foreseen.workload, hardware) if each.tp == 1]
    fits = host_bytes != 900 * 10**9
    assert foreseen.row("zero3_offload").fits == fits
    assert bool(found) == fits
    assert all(bool(each.condition) == (host_bytes is None) for each in found)
    assert ("if the host has 988GB" in foreseen.advice.reason) == (host_bytes is None)
    assert ("if host?" in str(foreseen)) == (host_bytes is None)


@pytest.mark.parametrize(
    ("preset", "accumulation", "precision"),
    [
        ("zero1_offload", 1, "bf16"),
        ("zero2_offload", 3, "bf16"),
        ("zero3_offload", 1, "bf16"),
        ("zero3_offload", 2, "fp32"),
    ],
)
def test_what_is_moved_is_what_the_engine_moves(preset, accumulation, precision):
    workload = Workload(sequence=64, accumulation=accumulation, precision=precision, checkpointing=False)
    model = from_dimensions(SMALL, None)
    foreseen = foresee_workload(model, workload, preset, 2)
    moved = moved_bytes(workload.config(preset), model.trainable, model.frozen, 2)
    seen = foreseen.moved_bytes
    assert moved.down == pytest.approx(seen["device to host"], rel=0.002)  # padding
    # Less the two units that end the forward and stay for the backward, and the embedding, which is updated first: its
    # states have been fetched when the backward reaches it.
    staying = 2 * SMALL.embedding_numel + SMALL.layer_numel() if preset == "zero3_offload" else 0
    assert moved.up - 4 * accumulation * staying // 2 <= seen["host to device"] * 1.002
    assert seen["host to device"] <= moved.up * 1.002


def test_between_nodes_the_shared_link_counts():
    rates = Rates(gpu_link=100e9, node_link=50e9)
    assert wire_s({"inner": 7 * GB, "outer": 0}, Hardware(8, rates=rates)) == pytest.approx(0.07)
    # 8 GPUs share the link, and each sends its eighth of a half.
    two = Hardware(16, nodes=2, rates=rates)
    assert wire_s({"inner": 14 * GB, "outer": GB}, two) == pytest.approx(8 / 50)


def test_operations_of_a_step():
    of, plain = find("llama2-7b"), Workload(sequence=1, checkpointing=False)
    weights = 6_738_415_616 + 32 * 4096
    assert operations(from_dimensions(of, None), plain) == 6 * weights
    assert operations(from_dimensions(of, None), Workload(sequence=1, accumulation=2)) == 2 * 8 * weights
    assert operations(from_dimensions(of, (16, ("q_proj",))), plain) == 4 * weights


def test_json_has_the_search(monkeypatch, capsys):
    from shardwise.cli import main

    line = "shardwise plan llama3-8b --gpus 2 --gpu-memory 44GB --host-memory 1TB --accumulate 4 --search --json"
    monkeypatch.setattr("sys.argv", line.split())
    with pytest.raises(SystemExit):
        main()
    found = json.loads(capsys.readouterr().out)["search"]
    assert [each["cost"] for each in found] == sorted(each["cost"] for each in found)
    assert found[0].keys() >= {"preset", "micro_batch", "accumulation", "checkpointing", "resident", "peak_bytes"}
