"""Host tiers on CUDA. Run on a machine with a GPU: `pytest -m gpu tests/test_offload_gpu.py`."""

import contextlib
import gc
import os

import pytest
import torch

import shardwise
from shardwise.models.built_in import GPT
from support import matrix, run_ranks
from support.training import PRECISIONS, digest, make_optimizer

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products; read when CUDA starts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PLACEMENTS = {
    "zero1_offload": ("zero1", {}),
    "zero2_offload": ("zero2", {}),
    "zero3_offload": ("zero3", {}),
    "zero3, optim": ("zero3", {"optim": {"tier": "host"}}),
    "zero3, weights": ("zero3", {"weights": {"tier": "host"}}),
    "zero2, grads": ("zero2", {"grads": {"tier": "host"}}),
}


VOCABULARY = 2000


def make_engine(placement, precision="bf16", offload=None, layers=8, **more):
    stage, tiers = PLACEMENTS.get(placement, (placement, {}))
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(1024, layers, 8, VOCABULARY, 257)
    config = {
        "preset": stage if tiers else placement,
        **({"placement": tiers} if tiers else {}),
        "precision": PRECISIONS[precision],
        "gradients": {"clip_norm": 1.0},
        "offload": offload or {},
        **more,
    }
    return shardwise.initialize(model, make_optimizer(model), config)


def train_step(engine, rank, step):
    count = engine.config.batch.accumulation
    for micro in range(count):
        generator = torch.Generator(device="cuda").manual_seed(1000 * rank + step * count + micro)
        loss = engine(torch.randint(VOCABULARY, (4, 257), device="cuda", generator=generator))
        engine.backward(loss)
        engine.step()
    return loss


def train(placement, precision, accumulation, rank, looks, **more):
    """Units of 12 M elements in buckets of 4 M, so that transfers and kernels truly run beside each other."""
    more = {"checkpointing": {"enabled": True}, "layers": 3, **more}
    engine = make_engine(placement, precision, batch={"accumulation": accumulation}, **more)
    hashes = []
    for step in range(4):
        train_step(engine, rank, step)
        if looks or step == 3:
            hashes.append(digest(engine))
    engine.destroy()
    return hashes


def same_bits(rank, world_size, precision, accumulation):
    torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(True)
    expected = {}
    for placement, (stage, _) in PLACEMENTS.items():
        for looks in (False, True):
            if (stage, looks) not in expected:
                expected[stage, looks] = train(stage, precision, accumulation, rank, looks)
            offload = {"buffer_bytes": 4 * 1024 * 1024 * 16, "buffer_count": 3 if looks else 8}
            seen = train(placement, precision, accumulation, rank, looks, offload=offload)
            assert seen == expected[stage, looks], (placement, looks)
    assert len(set(expected["zero3", True])) == 4, "training did not change the weights"
    assert expected["zero3", True][-1:] == expected["zero3", False]


@matrix({"world_size": [1, 2], "accumulation": [1, 2], "precision": list(PRECISIONS)})
def test_the_same_bits_as_on_the_device(world_size, precision, accumulation):
    run_ranks(same_bits, world_size, precision, accumulation, timeout=280)


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("placement", list(PLACEMENTS))
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_host_never_waits(placement, accumulation):
    engine = make_engine(placement, batch={"accumulation": accumulation})
    for step in range(3):
        train_step(engine, 0, step)
    data = torch.randint(VOCABULARY, (4, 257), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3 * accumulation):
            engine.backward(engine(data))
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    engine.destroy()


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("pin_memory", [True, False])
def test_host_memory_is_right_sized(pin_memory):
    """14 bytes for each parameter, page-locked or not, and given back."""
    engine = make_engine("zero2_offload", offload={"pin_memory": pin_memory})
    for step in range(2):
        train_step(engine, 0, step)
    numel = sum(unit.layout.numel for unit in engine.units)
    assert engine.report().tier_bytes["host"] == 14 * numel
    storages = [storage for unit in engine.units for storage in unit.states.storages.values()]
    assert {storage.tensor.is_pinned() for storage in storages} == {pin_memory}
    engine.destroy()
    assert engine.report().tier_bytes.get("host", 0) == 0


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("placement", ["zero2_offload", "zero3_offload"])
def test_the_device_holds_what_the_ledger_says(placement):
    def trained():
        engine = make_engine(placement, batch={"accumulation": 1})
        for step in range(3):
            train_step(engine, 0, step)
        torch.cuda.synchronize()
        return engine

    # A first run makes what libraries keep for the process (cuBLAS's workspaces), and what earlier tests left is freed
    # now: either would otherwise change during the measurement.
    trained().destroy()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    engine = trained()
    held = torch.cuda.memory_allocated() - before
    assert held == pytest.approx(engine.report().tier_bytes["device"], rel=0.05, abs=2**22)
    engine.destroy()


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("placement", ["zero1", "zero3"])
def test_states_leave_the_device_between_steps(placement):
    def train(away):
        engine = make_engine(placement, batch={"accumulation": 1})
        states = 12 * sum(param.numel() for param in engine.module.parameters())  # fp32 masters and Adam's two moments
        for step in range(4):
            train_step(engine, 0, step)
            torch.cuda.synchronize()
            before, all_of_it = torch.cuda.memory_allocated(), engine.report().tier_bytes["device"]
            with engine.offloaded() if away else contextlib.nullcontext():
                freed = before - torch.cuda.memory_allocated()
                expected = all_of_it if placement == "zero3" else states
                assert not away or freed >= 0.95 * expected
                engine.backward(engine(torch.zeros(4, 257, dtype=torch.long, device="cuda")))
                engine.zero_grad()
        found = digest(engine)
        engine.destroy()
        return found

    assert train(away=True) == train(away=False)


def same_bits_with_activations_away(rank, world_size):
    torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(True)
    for placement in ("zero2", "zero3_offload"):
        expected = train(placement, "bf16", 2, rank, True)
        checkpointing = {"enabled": True, "offload": True}
        assert train(placement, "bf16", 2, rank, True, checkpointing=checkpointing) == expected, placement


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_same_bits_with_activations_on_the_host(world_size):
    run_ranks(same_bits_with_activations_away, world_size, timeout=280)


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("placement", ["zero2_offload", "zero3_offload"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_host_updates_as_the_device_does(placement, precision):
    """To a few units in the last place after one update; later steps start from weights that differ as much."""

    def run(offload):
        torch.manual_seed(0)
        engine = make_engine(placement, precision, offload=offload)
        losses, masters = [train_step(engine, 0, 0).item()], []
        for unit in engine.units:
            unit.synchronize()
            masters.append(unit.weights.master.float().cpu().clone())
        losses += [train_step(engine, 0, step).item() for step in range(1, 6)]
        hosted = [unit.states.updates_on_host for unit in engine.units]
        engine.destroy()
        return losses, masters, hosted

    losses, masters, _ = run({"update": "device"})
    for offload in ({"update": "host"}, {"update": "split", "host_share": 0.5}, {"update": "split"}):
        seen_losses, seen_masters, hosted = run(offload)
        assert any(hosted)
        assert all(hosted) == (offload["update"] == "host")
        for mine, theirs in zip(seen_masters, masters, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)
        assert seen_losses == pytest.approx(losses, rel=2e-3)
