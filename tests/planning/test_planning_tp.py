"""The dry run of one rank of a (dp, tp) mesh, against four real ranks."""

import gc
import json
import statistics
from dataclasses import replace

import pytest
import torch

import shardwise
from shardwise.errors import ConfigError
from shardwise.estimate.hardware import Hardware
from shardwise.models.built_in import GPT, tokens
from shardwise.models.tensor_parallel import tensor_parallel
from shardwise.models.workload import Workload
from shardwise.observe import StorageObserver
from support import run_ranks

LLAMA = {
    "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "vocab_size": 32000,
    "num_key_value_heads": 8, "intermediate_size": 4096, "tie_word_embeddings": True,
}  # fmt: skip
PRESETS = ("zero1", "zero2", "zero3")
BATCH, LENGTH, HIDDEN, LAYERS, VOCABULARY = 2, 64, 128, 6, 128


def build():
    model = GPT(hidden=HIDDEN, layers=LAYERS, heads=4, vocabulary=VOCABULARY, length=LENGTH, fused=False)
    return model, tokens(BATCH, LENGTH, VOCABULARY)


def foreseen(rank, world_size, folder):
    found = [shardwise.foresee(build, preset, 4, "cpu", tp=2) for preset in PRESETS]
    found.append(shardwise.foresee(build, "zero3_hybrid", 8, "cpu", nodes=2, tp=2))
    with pytest.raises(ConfigError, match="4 ranks cannot be spread evenly over 1 nodes with tp 3"):
        shardwise.foresee(build, "zero3", 4, "cpu", tp=3)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    check_plan(str(folder))
    return [(each.peak_bytes, each.sent_bytes) for each in found]


def check_plan(llama):
    """`shardwise plan --tp`: a rank holds about a half, and sends about a half over dp as one of as many copies."""
    on, presets, both = Hardware(gpus=4), ("zero1", "zero3"), Workload(tp=2, sequence=128)
    halves = shardwise.plan(llama, hardware=on, workload=both, presets=presets, detailed=True)
    reckoned = shardwise.plan(llama, hardware=on, workload=both, presets=presets)
    copies = shardwise.plan(
        llama, hardware=replace(on, gpus=2), workload=Workload(sequence=128), presets=presets, detailed=True
    )
    for half, estimate, copy in zip(halves.rows, reckoned.rows, copies.rows, strict=True):
        assert (half.is_dry_run, estimate.is_dry_run) == (True, False)
        assert estimate.peak_bytes == pytest.approx(half.peak_bytes, rel=0.15)
        assert half.wire_bytes == pytest.approx(copy.wire_bytes / 2, rel=0.02)
        assert half.categories["moments"] == pytest.approx(copy.categories["moments"] / 2, rel=0.02)
    assert "each of 2 copies of the model is on 2 GPUs: a GPU sends" in halves.notes[0]
    with pytest.raises(ConfigError, match="--tp 3 does not divide 4 GPUs"):
        shardwise.plan(llama, hardware=on, workload=Workload(tp=3))
    with pytest.raises(ConfigError, match="--tp 2 needs a model whose dimensions are known, without adapters"):
        shardwise.plan(params=10**9, hardware=on, workload=Workload(tp=2))
    with pytest.raises(ConfigError, match="12 attention heads cannot be cut into 8 parts: take a tp that divides them"):
        shardwise.plan("gpt2", hardware=replace(on, gpus=8), workload=Workload(tp=8), presets=presets)


def measured(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()  # it has meshes of earlier tests, whose groups are gone
    if world_size == 8:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
        return [observed(mesh, "zero3_hybrid")]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return [observed(mesh, preset) for preset in PRESETS]


def observed(mesh, preset):
    """Peak and bytes sent of a step after the second.

    The middle one of three peaks: Gloo's threads may hold a buffer of torch's collectives a moment longer than needed.
    """
    torch.manual_seed(0)
    model, make_batch = build()
    tensor_parallel(model, mesh["tp"])
    engine = shardwise.initialize(model, torch.optim.AdamW(model.parameters()), preset, mesh=mesh)
    for step in range(2):
        train(engine, make_batch(0, step))
    peaks = []
    for step in range(3, 6):
        gc.collect()
        engine.comm.sent_bytes.clear()
        with StorageObserver() as memory:
            train(engine, make_batch(0, step))
        peaks.append(memory.peak_bytes)
    sent = dict(engine.comm.sent_bytes)
    engine.destroy()
    return statistics.median(peaks), sent


def train(engine, batch):
    engine.backward(engine(**batch))
    engine.step()


@pytest.mark.timeout(300)
def test_peak_and_traffic_of_a_rank_of_the_mesh_are_the_measured_ones(tmp_path):
    (predicted,) = run_ranks(foreseen, 1, tmp_path, fresh=True, init=False, timeout=200)
    ranks = [found + more for found, more in zip(run_ranks(measured, 4) * 2, run_ranks(measured, 8), strict=True)]
    activations = BATCH * LENGTH * HIDDEN * 4
    logits = BATCH * LENGTH * VOCABULARY // 2 * 4
    for number, preset in enumerate((*PRESETS, "zero3_hybrid")):
        peak_bytes, sent = predicted[number]
        assert peak_bytes == pytest.approx(statistics.median(each[number][0] for each in ranks), rel=0.03), preset
        assert all(sent[kind] == ranks[0][number][1][kind] for kind in ("gather", "reduce"))
        # Forward: out, down and the embedding. Backward: the inputs of q, k, v, up and the head.
        assert sent["tp"] == (6 * LAYERS + 2) * activations + logits
