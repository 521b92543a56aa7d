"""Streamed weights on CUDA. Run on a machine with a GPU: `pytest -m gpu tests/test_stream_gpu.py`."""

import copy
import gc
import os

import pytest
import torch
from torch import nn

import shardwise
from support import run_ranks

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products; read when CUDA starts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTH, LAYERS, SEQUENCES = 2048, 12, 64


class Block(nn.Module):
    """Two products and a norm: 16 M elements, whose copy takes about as long as 64 rows take to compute."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def chain(layers=LAYERS, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(layers))).to(dtype).eval()


def inputs(number):
    generator = torch.Generator(device="cuda").manual_seed(number)
    return torch.randn(SEQUENCES, WIDTH, device="cuda", generator=generator, dtype=torch.bfloat16)


@torch.no_grad()
def expected_outputs(model, count):
    resident = copy.deepcopy(model).cuda()
    return [resident(inputs(number)).cpu() for number in range(count)]


def unit_bytes(model):
    return sum(param.nbytes for param in model[0].parameters())


@pytest.mark.parametrize("units", [1.1, 2.2, 4.2, 7.5, 11.5, None])
def test_the_same_bits_as_on_the_device(units):
    """Buffers are poisoned: a kernel that runs before its weights have arrived gives NaN, and one that runs while the
    next unit's weights are written gives other bits."""
    model = chain()
    expected = expected_outputs(model, 8)
    budget = None if units is None else int(units * unit_bytes(model))
    streamed = shardwise.stream(model, "host", device_memory=budget)
    seen = [streamed(inputs(number)) for number in range(8)]  # without a look in between
    report = streamed.shardwise_stream.report()
    assert (report.resident_units == LAYERS) == (units is None)
    assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(seen, expected, strict=True))
    streamed.shardwise_stream.close()


def test_the_host_never_waits():
    streamed = shardwise.stream(chain(), "host", device_memory=5 * unit_bytes(chain()))
    x = inputs(0)
    streamed(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            streamed(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    streamed.shardwise_stream.close()


@pytest.mark.parametrize("units", [1.1, 4.2, 8.5])
def test_the_peak_is_what_was_foreseen(units):
    gc.collect()
    torch.cuda.empty_cache()
    model = chain()
    before = torch.cuda.memory_allocated()
    streamed = shardwise.stream(model, "host", device_memory=int(units * unit_bytes(model)))
    stream = streamed.shardwise_stream
    x = inputs(0)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        streamed(x)
    torch.cuda.synchronize()
    passing = 8 * x.nbytes
    cublas = 32 << 20
    held = torch.cuda.max_memory_allocated() - before
    assert held <= 1.03 * stream.foreseen_peak_bytes + passing + cublas
    assert stream.report().weights_peak_bytes <= stream.foreseen_peak_bytes
    stream.close()
    del streamed, stream, x
    gc.collect()
    assert torch.cuda.memory_allocated() - before <= cublas


def test_weights_rest_in_pinned_memory_that_close_frees():
    streamed = shardwise.stream(chain(), "host", device_memory=5 * unit_bytes(chain()))
    stream = streamed.shardwise_stream
    tensors = [unit.states.on_host("master") for unit in stream.units if unit.states.is_offloaded]
    assert tensors
    assert all(tensor.is_pinned() for tensor in tensors)
    del tensors
    stream.close()
    assert not any(stream._ledger.by_tier().values())


@pytest.mark.parametrize("cached", [0, 3])
def test_the_same_bits_from_files(cached, tmp_path):
    """Reads, copies and kernels run beside each other: a buffer that is read into too early gives other bits."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=1024, intermediate_size=4096, num_hidden_layers=10, num_attention_heads=8
    )
    model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    model.save_pretrained(tmp_path, max_shard_size="100MB")
    layer = sum(param.nbytes for param in model.model.layers[0].parameters())
    model.cuda()
    ids = torch.randint(512, (8, 32), device="cuda")
    with torch.no_grad():
        expected = model(ids).logits
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    streamed = shardwise.stream(
        tmp_path, "disk", device_memory=6 * layer, host_memory=cached * layer, batch=8, context=40
    )
    assert "disk" in streamed.shardwise_stream.placement.tiers
    for _ in range(3):
        assert torch.equal(streamed(ids).logits, expected)
    seen = streamed.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    assert torch.equal(seen, tokens)
    streamed.shardwise_stream.close()


def test_keys_and_values_on_the_host_give_the_same_tokens():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8
    )
    model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    ids = torch.randint(512, (2, 16), device="cuda")
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    expected = copy.deepcopy(model).cuda().generate(ids, **options)
    streamed = shardwise.stream(model, "host", device_memory="30MB", kv="host", batch=2, context=24)
    assert torch.equal(streamed.generate(ids, **options), expected)
    streamed.shardwise_stream.close()


def same_bits_on_ranks(rank, world_size):
    torch.cuda.set_device(0)
    model = chain(6)
    expected = expected_outputs(model, 4)
    streamed = shardwise.stream(model, "host", device_memory=int(5 * unit_bytes(model)), device="cuda:0")
    for number in range(4):
        assert torch.equal(streamed(inputs(number)).cpu(), expected[number])
    streamed.shardwise_stream.close()


@pytest.mark.parametrize("world_size", [2])
def test_ranks_gather_the_same_bits(world_size):
    run_ranks(same_bits_on_ranks, world_size, timeout=280)
