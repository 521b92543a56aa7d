"""The contracts on CUDA. Run on a machine with a GPU: `pytest -m gpu tests/test_gpu.py`.

Ranks share one GPU over Gloo (NCCL refuses two ranks on one); what needs no second rank runs alone over NCCL.
"""

import contextlib
import os
import subprocess
import sys

import pytest
import torch

import shardwise
import shardwise.errors
from shardwise.models.built_in import GPT, MLP
from support import matrix, run_ranks
from support.training import PRECISIONS, digest, make_optimizer

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products; read when CUDA starts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STAGES = ["zero0", "zero1", "zero2", "zero3"]


def make_engine(preset, precision="bf16", model=None, **more):
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(256, 4, 4, 1000, 128) if model is None else model()
    config = {"preset": preset, "precision": PRECISIONS[precision], "gradients": {"clip_norm": 1.0}, **more}
    return shardwise.initialize(model, make_optimizer(model), config)


def tokens(seed):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(1000, (4, 128), device="cuda", generator=generator)


def train_step(engine, rank, step):
    count = engine.config.batch.accumulation
    for micro in range(count):
        loss = engine(tokens(1000 * rank + step * count + micro))
        engine.backward(loss)
        engine.step()
    return loss


def same_bits(rank, world_size, precision, accumulation, presets):
    torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(True)
    hashes = {}
    for preset, prefetch in presets:
        engine = make_engine(
            preset,
            precision,
            batch={"accumulation": accumulation},
            gradients={"clip_norm": 1.0, **({"order": "sharded"} if accumulation > 1 else {})},
            runtime={"prefetch": prefetch},
        )
        seen = []
        for step in range(4):
            train_step(engine, rank, step)
            seen.append(digest(engine))
        engine.destroy()
        assert len(set(seen)) == len(seen), "training did not change the weights"
        hashes[preset, prefetch] = tuple(seen)
    assert len(set(hashes.values())) == 1, hashes


@matrix({"world_size": [1, 2, 3], "precision": list(PRECISIONS), "accumulation": [1, 2]})
def test_stages_and_prefetch_give_the_same_bits(world_size, precision, accumulation):
    presets = [(preset, 1) for preset in STAGES] + [("zero3", 0), ("zero3", 2)]
    run_ranks(same_bits, world_size, precision, accumulation, presets, timeout=200)


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("preset", STAGES)
@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_host_never_waits(preset, precision, accumulation):
    engine = make_engine(preset, precision, batch={"accumulation": accumulation})
    data = tokens(0)

    def step():
        for _ in range(accumulation):
            engine.backward(engine(data))
            engine.step()

    for _ in range(3):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    engine.destroy()


@pytest.mark.usefixtures("nccl")
def test_an_overflow_on_the_device_leaves_no_trace():
    engine = make_engine("zero3", "fp16")
    train_step(engine, 0, 0)
    before = digest(engine)
    handle = engine.module.head.weight.register_hook(lambda grad: grad * torch.inf)
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.backward(engine(torch.zeros(4, 128, dtype=torch.int64, device="cuda")))
        engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    handle.remove()
    assert engine.was_skipped
    assert digest(engine) == before
    train_step(engine, 0, 1)
    assert not engine.was_skipped
    assert digest(engine) != before
    engine.destroy()


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("preset", STAGES)
def test_reserved_memory_stays_close_to_allocated_and_does_not_grow(preset):
    torch.cuda.empty_cache()
    engine = make_engine(preset, "bf16", lambda: MLP(2048, 16))
    data = torch.randn(16, 2048, device="cuda")
    reserved = []
    for step in range(200):
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        engine.backward(engine(data))
        engine.step()
        reserved.append(torch.cuda.memory_reserved())
        if step == 21:
            assert torch.cuda.max_memory_reserved() <= 1.1 * torch.cuda.max_memory_allocated()
    assert reserved[-1] == reserved[21]
    engine.destroy()


BUILT_BEFORE = """
import torch, shardwise
from shardwise.models.built_in import MLP
with torch.device("cuda"):
    model = MLP(4096, 8)
config = {"preset": "PRESET", "precision": {"compute": "bf16"}}
engine = shardwise.initialize(model, torch.optim.AdamW(model.parameters()), config)
for _ in range(3):
    engine.backward(engine(torch.randn(16, 4096, device="cuda")))
    engine.step()
assert torch.cuda.max_memory_reserved() <= 1.1 * torch.cuda.max_memory_allocated(), torch.cuda.memory_summary()
"""


@pytest.mark.parametrize("preset", ["zero0", "zero3"])
def test_reserved_memory_of_a_model_that_was_built_before(preset):
    """In torch's fixed segments, that is: only `initialize` tells its allocator to map memory as it is needed."""
    script = BUILT_BEFORE.replace("PRESET", preset)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


WITHIN_ITS_PEAK = """
import torch, shardwise
from shardwise.models.built_in import GPT
with torch.device("cuda"):
    model = GPT(512, 8, 8, 32000, 513, tied=True, recompute=True)
config = {"preset": "PRESET", "precision": {"compute": "bf16"}, "gradients": {"clip_norm": 1.0}}
engine = shardwise.initialize(model, torch.optim.AdamW(model.parameters()), config)
data = torch.randint(32000, (4, 513), device="cuda")
def train():
    for _ in range(4):
        engine.backward(engine(data))
        engine.step()
    torch.cuda.synchronize()
train()
assert {segment["stream"] for segment in torch.cuda.memory_snapshot()} == {0}, torch.cuda.memory_summary()
peak = torch.cuda.max_memory_allocated()
torch.cuda.empty_cache()
torch.cuda.set_per_process_memory_fraction(1.25 * peak / torch.cuda.get_device_properties(0).total_memory)
torch.cuda.reset_peak_memory_stats()
train()
assert torch.cuda.max_memory_reserved() <= 1.25 * peak, torch.cuda.memory_summary()
"""


@pytest.mark.parametrize("preset", ["zero1_offload", "zero2_offload", "zero3_offload"])
def test_little_more_is_needed_than_allocated(preset):
    """No stream but the compute stream has memory of its own, and 1.25 times the allocated peak suffices to train: what
    the allocator reserves beyond that it gives back when it has to, page by page."""
    subprocess.run([sys.executable, "-c", WITHIN_ITS_PEAK.replace("PRESET", preset)], check=True, timeout=120)


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("preset", ["zero2", "zero3"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_blocks(preset, checkpointed):
    losses = {}
    for compiled in (False, True):
        engine = make_engine(preset, checkpointing={"enabled": checkpointed})
        if compiled:
            for block in engine.module.blocks:
                block.compile()
        losses[compiled] = [train_step(engine, 0, step).item() for step in range(4)]
        engine.destroy()
    assert losses[True] == pytest.approx(losses[False], rel=2e-2)


@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_a_deferred_model_goes_to_this_ranks_gpu(preset):
    torch.manual_seed(0)
    plain = GPT(256, 4, 4, 1000, 128)
    torch.manual_seed(0)
    with shardwise.deferred_init():
        model = GPT(256, 4, 4, 1000, 128)
    assert all(param.is_meta or param.nbytes <= 16 << 10 for param in model.parameters())
    engine = shardwise.initialize(model, make_optimizer(model), preset)
    for name, param in plain.named_parameters():
        assert torch.equal(engine.full_param(name).cpu(), param.detach()), name
    average = shardwise.ema(engine, decay=0.9)
    for step in range(2):
        train_step(engine, 0, step)
    with average.applied(), torch.no_grad():
        assert engine(tokens(9)).isfinite()
    engine.destroy()


@pytest.mark.parametrize("preset", STAGES)
def test_muon_on_whole_matrices_is_torchs(preset):
    torch.use_deterministic_algorithms(True)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(GPT(256, 2, 4, 1000, 128).cuda())
    engine = shardwise.initialize(models[0], muon_and_adamw(models[0]), preset)
    optimizers = muon_and_adamw(models[1])
    for step in range(2):
        train_step(engine, 0, step)
        models[1](tokens(step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.use_deterministic_algorithms(False)
    for name, param in models[1].named_parameters():
        torch.testing.assert_close(engine.full_param(name), param.detach(), rtol=1e-4, atol=1e-5)
    engine.destroy()


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("preset", [*STAGES, "zero2_offload"])
def test_clipping_and_dropping_gradients_never_wait_for_the_device(preset):
    """A penalty's gradients arrive in autograd's device thread, where `p.grad` is held by the engine."""
    engine = make_engine(preset, batch={"accumulation": 2})
    for step in range(3):
        for micro in range(2):
            loss = engine(tokens(2 * step + micro))
            if preset in ("zero0", "zero1", "zero2"):
                loss = loss + sum(param.float().square().sum() for param in engine.module.parameters())
            with sync_checked(step > 0 and preset in STAGES):
                if micro == 0:
                    engine.optimizer.zero_grad()
                loss.backward()
                if micro == 1:
                    norm = engine.clip_grad_norm_(0.5)
                engine.step()
        assert norm.isfinite()
    assert engine.steps == 3
    engine.backward(engine(tokens(0)))
    for attempt in (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_):
        with pytest.raises(shardwise.errors.GradientError, match=r"engine\.clip_grad_norm_"):
            attempt(engine.module.parameters(), 1.0)
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(torch.ones((), device="cuda"))
    with pytest.raises(shardwise.errors.GradientError, match="GradScaler"):
        scaler.unscale_(engine.optimizer)
    engine.destroy()


@contextlib.contextmanager
def sync_checked(is_on):
    torch.cuda.set_sync_debug_mode("error" if is_on else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def muon_and_adamw(model):
    inner = {id(param) for param in model.blocks.parameters() if param.ndim == 2}
    params = list(model.parameters())
    return [
        torch.optim.Muon([param for param in params if id(param) in inner], lr=0.02),
        torch.optim.AdamW([param for param in params if id(param) not in inner], lr=1e-3, fused=True),
    ]


def resumed(rank, world_size, folder, preset, precision):
    """An asynchronous save while training goes on; from it, the same steps give the same bits and random numbers."""
    torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(True)
    engine = make_engine(preset, precision)
    for step in range(2):
        train_step(engine, rank, step)
    engine.save(folder, blocking=False)
    expected = []
    for step in range(2, 4):
        train_step(engine, rank, step)
        expected.append(digest(engine))
    expected.append(torch.rand(3, device="cuda").tolist())
    engine.finish_save()
    engine.export(folder / "exported")
    engine.destroy()
    engine = make_engine(preset, precision)
    torch.rand(7, device="cuda")
    engine.load(folder)
    seen = []
    for step in range(2, 4):
        train_step(engine, rank, step)
        seen.append(digest(engine))
    seen.append(torch.rand(3, device="cuda").tolist())
    assert seen == expected
    engine.destroy()


@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize("preset", STAGES)
def test_resuming_is_never_having_stopped(preset, precision, tmp_path):
    run_ranks(resumed, 2, tmp_path, preset, precision, timeout=200)
