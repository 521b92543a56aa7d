"""Streamed weights: the same bits as a resident model, wherever the weights rest, and the memory that was foreseen."""

import contextlib
import copy
import gc
import json
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import shardwise
from shardwise.deferred import pretrained as names_in_files
from shardwise.deferred.pretrained import PretrainedWeights
from shardwise.errors import CheckpointError, ConfigError, DiskError
from shardwise.inference.working_memory import dimensions_in, working_memory
from shardwise.memory.placement import UnitSize, place, spread, window_bytes
from shardwise.observe.storage import StorageObserver
from shardwise.offload import weight_files
from shardwise.offload.streams import PAST
from shardwise.partition import Span
from shardwise.partition.stored import stored_tensors
from shardwise.unit.master import ORIGIN
from support import ranks
from test_quantized import Wrapped, of_dtype, wrapped
from test_quantized import build as build_quantized

transformers = pytest.importorskip("transformers")
VOCABULARY, LAYERS = 96, 8
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def make(kind):
    """A causal model of a kind, in bf16 but for its buffers."""
    torch.manual_seed(0)
    if kind == "moe":
        config = transformers.MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2)
        made = transformers.MixtralForCausalLM._from_config(config, dtype=torch.bfloat16)
    else:
        config = transformers.LlamaConfig(**SHAPE, tie_word_embeddings=kind == "tied")
        made = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    return made.eval()


def prompts(number=0):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(2, VOCABULARY, (2, 7), generator=generator)


def answers(model):
    """Logits of two prompts, and a greedy continuation."""
    with torch.no_grad():
        logits = [model(prompts(number)).logits.clone() for number in range(2)]
    ids = prompts(2)
    return [*logits, model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False)]


def check_same(model, expected):
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(answers(model), expected, strict=True))


def budgets(model):
    """From the least that works to all, in bytes for weights."""
    stream = shardwise.stream(copy.deepcopy(model), "host", device="cpu").shardwise_stream
    sizes = sorted(unit.full_bytes for unit in stream.placement.units)
    stream.close()
    least = sizes[-1] + min(sizes)
    return [least, *(least + number * sizes[-1] for number in (2, 5, 6)), sum(sizes)]


def save(model, folder):
    """A Hugging Face folder with the names of the model's own parameters, in two files."""
    folder.mkdir()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    names = [name for name, _ in model.named_parameters()]
    tensors = dict(model.named_parameters())
    index = {}
    for number in range(2):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name].detach().contiguous() for name in names[number::2]}, folder / file)
        index |= dict.fromkeys(names[number::2], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def budget_for(model, weights_bytes, batch=2, context=16):
    """`device_memory` that leaves `weights_bytes` for weights."""
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    return weights_bytes + buffers + working_memory(dimensions_in(model.config), batch, context, 2).total_bytes


def layer_bytes(model):
    return sum(param.nbytes for param in model.model.layers[0].parameters())


@pytest.mark.parametrize("kind", ["dense", "tied", "moe"])
def test_the_same_bits_under_every_budget(kind):
    model = make(kind)
    expected = answers(model)
    resident = set()
    for weights_bytes in budgets(model):
        budget = budget_for(model, weights_bytes)
        streamed = shardwise.stream(
            copy.deepcopy(model), "host", device_memory=budget, device="cpu", batch=2, context=16
        )
        stream = streamed.shardwise_stream
        check_same(streamed, expected)
        report = stream.report()
        resident.add(report.resident_units)
        assert report.weights_peak_bytes <= stream.placement.device_bytes <= weights_bytes
        assert stream.foreseen_peak_bytes <= budget
        stream.close()
        assert not any(stream._ledger.by_tier().values())
    assert {1, len(stream.units)} <= resident
    assert len(resident) > 3


@pytest.mark.parametrize("kind", ["dense", "tied", "moe"])
@pytest.mark.parametrize("cached", [0, 2])
def test_the_same_bits_from_files(kind, cached, tmp_path, monkeypatch):
    """Blocks of two pages, so that units are read in many and tensors lie across them."""
    monkeypatch.setattr(weight_files, "BLOCK_BYTES", 8192)
    model = make(kind)
    folder = save(model, tmp_path / "model")
    files = {path: path.read_bytes() for path in folder.iterdir()}
    budget = budget_for(model, 5 * layer_bytes(model))
    options = {"device": "cpu", "batch": 2, "context": 16}
    streamed = shardwise.stream(
        folder, "disk", device_memory=budget, host_memory=cached * layer_bytes(model), **options
    )
    check_same(streamed, answers(model))
    stream = streamed.shardwise_stream
    tiers = stream.placement.tiers
    assert "disk" in tiers
    assert ("host" in tiers) == bool(cached)
    assert stream.report().weights_peak_bytes <= stream.placement.device_bytes
    stream.close()
    assert {path: path.read_bytes() for path in folder.iterdir()} == files


def test_files_that_hold_each_expert_apart_are_streamed_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_files, "BLOCK_BYTES", 8192)
    model = make("moe")
    model.save_pretrained(tmp_path)  # with matrices for each expert, of which the model has one tensor for all
    expected, budget = answers(model), budget_for(model, 5 * layer_bytes(model))
    options = {"device_memory": budget, "device": "cpu", "batch": 2, "context": 16}
    for weights in ("host", "disk"):
        streamed = shardwise.stream(tmp_path, weights, **options)
        assert weights in streamed.shardwise_stream.placement.tiers
        check_same(streamed, expected)
        streamed.shardwise_stream.close()
    # Any part of a parameter, as ranks read it.
    stored = PretrainedWeights(tmp_path).match(model)["model.layers.1.mlp.experts.gate_up_proj"]
    flat = model.model.layers[1].mlp.experts.gate_up_proj.detach().flatten()
    for start, stop in [(0, 1), (2000, 2050), (2047, 8200), (16000, flat.numel())]:
        assert torch.equal(stored(Span(start, stop)), flat[start:stop])


def test_files_that_are_changed_otherwise_are_loaded_by_transformers(tmp_path, monkeypatch):
    monkeypatch.setattr(names_in_files, "_is_stacked", lambda operations, lists: False)
    model = make("moe")
    model.save_pretrained(tmp_path)
    budget = budget_for(model, 5 * layer_bytes(model))
    streamed = shardwise.stream(tmp_path, "host", device_memory=budget, device="cpu", batch=2, context=16)
    assert "host" in streamed.shardwise_stream.placement.tiers
    check_same(streamed, answers(model))
    streamed.shardwise_stream.close()
    with pytest.raises(CheckpointError, match="which the model"):
        shardwise.stream(tmp_path, "disk", device_memory=budget, device="cpu", batch=2, context=16)


@ranks(2, 3)
@pytest.mark.parametrize(("weights", "kind"), [("host", "moe"), ("disk", "dense")])
def test_ranks_gather_the_same_bits(rank, world_size, tmp_path, weights, kind):
    model = make(kind)
    if rank == 0:
        save(model, tmp_path / "model")
    torch.distributed.barrier()
    expected = answers(model)
    for layers in (5, LAYERS + 4):
        budget = budget_for(model, layers * layer_bytes(model))
        source = tmp_path / "model" if weights == "disk" else copy.deepcopy(model)
        streamed = shardwise.stream(source, weights, device_memory=budget, device="cpu", batch=2, context=16)
        stream = streamed.shardwise_stream
        check_same(streamed, expected)
        # What the next pass begins with is under way on all ranks.
        travels = [unit for unit in stream.units if unit.weights.policy.weights_sharded]
        live = [unit for unit in travels if unit.weights.state.value != "released"]
        assert live == travels[: stream.placement.ahead]
        held = stream.report().tier_bytes.get(weights, 0)
        away = sum(
            unit.full_bytes
            for unit, tier in zip(stream.placement.units, stream.placement.tiers, strict=True)
            if tier != "device"
        )
        assert held <= away / world_size + 128 * 64 or weights == "disk"
        assert stream.report().weights_peak_bytes <= stream.placement.device_bytes
        stream.close()


def test_quantized_weights_give_the_bits_of_torchao(tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    model = make("dense")
    model.save_pretrained(tmp_path)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    quantization.quantize_(expected, quantization.Int8WeightOnlyConfig())
    budget = budget_for(model, 3 * layer_bytes(model))
    for source in (tmp_path, copy.deepcopy(model)):
        streamed = shardwise.stream(
            source, "host", device_memory=budget, precision="int8", device="cpu", batch=2, context=16
        )
        stream = streamed.shardwise_stream
        assert 0 < stream.placement.fetched_bytes < 0.8 * LAYERS * layer_bytes(model)
        check_same(streamed, answers(expected))
        stream.close()


def test_int4_is_made_or_refused_with_what_torchao_lacks(tmp_path):
    pytest.importorskip("torchao.quantization")
    with contextlib.suppress(ImportError):
        import mslk  # noqa: F401

        pytest.skip("mslk, which brings torchao's kernels for int4, is installed")
    with pytest.raises(ConfigError, match=r"torchao cannot make int4 weights here \(.*mslk.*take int8"):
        shardwise.stream(chain(width=256), "host", precision="int4", device="cpu")
    with pytest.raises(
        ConfigError, match=r"quantized no layer to int4, because no width is a multiple of its groups \(128\)"
    ):
        shardwise.stream(chain(width=32), "host", precision="int4", device="cpu")


def test_keys_and_values_on_the_host_change_no_token():
    """On the CPU, device and host are one; tests/test_stream_gpu.py has the offloaded cache."""
    model = make("dense")
    budget = budget_for(model, 5 * layer_bytes(model))
    streamed = shardwise.stream(
        copy.deepcopy(model), "host", device_memory=budget, kv="host", device="cpu", batch=2, context=16
    )
    check_same(streamed, answers(model))
    streamed.shardwise_stream.close()
    with pytest.raises(ConfigError, match="kv='host' is for models of transformers"):
        shardwise.stream(chain(), "host", kv="host", device="cpu")


def test_quantized_weights_need_torchao(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)  # as if it were not installed
    with pytest.raises(ConfigError, match="torchao, which is not installed"):
        shardwise.stream(chain(), "host", precision="int8", device="cpu")
    with pytest.raises(ConfigError, match="is made in host memory"):
        shardwise.stream(chain(), "disk", precision="int4", device="cpu")


# What is held, and freed


def chain(layers=8, width=32):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def unit_bytes(width=32):
    return 4 * (width * width + width)


def chained(units, layers=8, **more):
    return shardwise.stream(chain(layers), "host", device_memory=int(units * unit_bytes()), device="cpu", **more)


def test_a_window_of_units_moves_over_the_pass_and_around():
    streamed = chained(3.5)
    stream, x = streamed.shardwise_stream, torch.ones(1, 32)
    assert stream.placement.ahead == 2
    for _ in range(3):
        streamed(x)
        # The next pass begins with these; they are under way before it is called.
        gathered = [unit.name for unit in stream.units if unit.weights.state.value != "released"]
        assert gathered == ["0 (frozen)", "1 (frozen)"]
    each = stream._offload.streams.moved_bytes["host to device"] / unit_bytes()
    assert each == 3 * 8 + 2
    stream.close()


def test_units_that_are_not_entered_after_all_are_released():
    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(chain(8))

        def forward(self, x, skipped=()):
            for number, layer in enumerate(self.layers):
                x = x if number in skipped else layer(x)
            return x

    model, x = Skipping(), torch.ones(1, 32)
    with torch.no_grad():
        expected = model(x, (1, 2, 5))
    streamed = shardwise.stream(model, "host", device_memory=int(3.5 * unit_bytes()), device="cpu")
    stream = streamed.shardwise_stream
    streamed(x)
    for _ in range(3):
        assert torch.equal(streamed(x, (1, 2, 5)), expected)
        live = sum(unit.weights.state.value != "released" for unit in stream.units)
        assert live <= 3
    assert stream.report().weights_peak_bytes <= 4 * unit_bytes()
    stream.close()


def test_an_exception_in_a_pass_leaves_the_model_usable():
    streamed, x = chained(3.5), torch.ones(1, 32)
    expected = streamed(x)
    with pytest.raises(RuntimeError):
        streamed(torch.ones(1, 31))
    assert torch.equal(streamed(x), expected)
    streamed.shardwise_stream.close()


def test_values_are_read_whole_and_copies_are_plain():
    plain = chain()
    streamed = chained(3.5)
    for name, value in plain.state_dict().items():
        assert torch.equal(streamed.state_dict()[name], value)
    twin = copy.deepcopy(streamed)
    assert torch.equal(twin(torch.ones(1, 32)), plain(torch.ones(1, 32)))
    assert getattr(twin, "shardwise_stream", None) is None
    streamed.shardwise_stream.close()


def test_precision_casts_the_weights_and_the_inputs():
    model, x = chain(), torch.randn(2, 32)
    with torch.no_grad():
        expected = copy.deepcopy(model).bfloat16()(x.bfloat16())
    streamed = shardwise.stream(model, "host", device_memory=2 * unit_bytes(), device="cpu", precision="bf16")
    assert torch.equal(streamed(x), expected)
    streamed.shardwise_stream.close()


def test_kernels_are_chosen_as_for_the_resident_model():
    """torch's matmul folds its batch or not by `requires_grad`, also under no_grad."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 10, bias=False)), torch.randn(2, 64, 7).transpose(1, 2)
    with torch.no_grad():
        expected = model(x)
    flags = [param.requires_grad for param in model.parameters()]
    streamed = shardwise.stream(model, "host", device="cpu")
    assert torch.equal(streamed(x), expected)
    assert [param.requires_grad for param in streamed.parameters()] == flags
    streamed.shardwise_stream.close()


def test_no_gradients_flow():
    streamed = chained(3.5)
    assert not streamed(torch.ones(1, 32, requires_grad=True)).requires_grad
    streamed.shardwise_stream.close()


@pytest.mark.parametrize("units", [3, 6])
def test_the_peak_seen_from_outside_is_at_most_what_was_foreseen(units):
    """Weights, keys and values, activations and logits of `generate`, without what rests on the host."""
    shape = {**SHAPE, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 512, "max_position_embeddings": 128}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(transformers.LlamaConfig(**shape), dtype=torch.bfloat16).eval()
    batch, prompt, new = 4, 60, 4
    budget = budget_for(model, int(units * 1.05 * layer_bytes(model)), batch, prompt + new)
    streamed = shardwise.stream(model, "host", device_memory=budget, device="cpu", batch=batch, context=prompt + new)
    stream = streamed.shardwise_stream
    on_host = [unit.states.on_host("master") for unit in stream.units if unit.states.is_offloaded]
    ids = torch.randint(2, 512, (batch, prompt))
    with StorageObserver(existing=[*on_host, streamed]) as memory:
        streamed.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    held = memory.peak_bytes - sum(tensor.nbytes for tensor in on_host)
    assert stream.placement.device_bytes < held <= 1.03 * stream.foreseen_peak_bytes
    assert held <= 1.03 * budget
    stream.close()


def test_close_frees_descriptors_threads_and_memory(tmp_path):
    folder = save(make("dense"), tmp_path / "model")
    budget = budget_for(make("dense"), 5 * layer_bytes(make("dense")), 1, 8)

    def use():
        streamed = shardwise.stream(folder, "disk", device_memory=budget, device="cpu", context=8)
        streamed(prompts()[:1])
        with streamed.shardwise_stream as stream:
            assert stream.report().tier_bytes["disk"]
        return stream

    use()
    gc.collect()
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    stream = use()
    assert not any(stream._ledger.by_tier().values())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shardwise-weights")]
    del stream
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert threading.active_count() <= threads


@pytest.mark.parametrize("weights", ["host", "disk"])
def test_a_model_that_is_dropped_without_close_frees_the_same(tmp_path, weights):
    model = make("dense")
    folder = save(model, tmp_path / "model")
    budget = budget_for(model, 5 * layer_bytes(model), 1, 8)

    def use():
        streamed = shardwise.stream(folder, weights, device_memory=budget, device="cpu", context=8)
        streamed(prompts()[:1])
        states = [unit.states for unit in streamed.shardwise_stream.units if unit.states.is_offloaded]
        held = [streamed, streamed.shardwise_stream._offload, *streamed.parameters(), *streamed.shardwise_stream.units]
        held += [storage for each in states for storage in each.storages.values()]
        return list(map(weakref.ref, held)), streamed.shardwise_stream

    use()[1].close()  # what only the first one opens stays
    gc.collect()
    before = descriptors_and_tasks()
    held = use()[0]
    gc.collect()
    wait_until(lambda: not any(reference() is not None for reference in held))
    wait_until(lambda: descriptors_and_tasks() <= before)


def test_a_model_that_is_dropped_waits_for_the_copies_under_way(monkeypatch):
    streamed, joined = chained(3.5), []
    monkeypatch.setattr(type(streamed.shardwise_stream._offload.streams), "wait", lambda _, event: joined.append(event))
    streamed(torch.ones(1, 32))
    joined.clear()
    del streamed
    gc.collect()
    assert joined == [PAST] * 3


def test_memory_of_a_dropped_model_counts_as_free(monkeypatch):
    streamed, measured = chained(3.5), []
    dropped = weakref.ref(streamed)
    gc.disable()
    try:
        del streamed
        monkeypatch.setattr(
            "shardwise.inference.start._device_room", lambda device: measured.append(dropped()) or 1 << 30
        )
        chained(3.5).shardwise_stream.close()
    finally:
        gc.enable()
    assert measured == [None]


def descriptors_and_tasks():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def wait_until(condition):
    """Reads ahead that are under way end by themselves."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, sorted(os.listdir("/proc/self/fd"))
        time.sleep(0.02)


# Quantised weights


class Opaque(Wrapped):
    """A quantised weight that, like torchao's, has no views of other shapes."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            raise NotImplementedError(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs)


def opaque(values):
    made = wrapped(values)
    return Opaque(made.values, made.scale)


@pytest.mark.parametrize("quantise", [opaque, of_dtype(torch.float8_e4m3fn), of_dtype(torch.int8)])
def test_quantised_weights_keep_their_dtypes_and_bits(quantise):
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = build_quantized(quantise)(x)
    for precision in (None, "fp32", "bf16"):
        model = build_quantized(quantise)
        before = {name: tensor.clone() for name, tensor in stored_tensors(model).items() if "weight" in name}
        shardwise.stream(model, "host", device_memory=3000, precision=precision, device="cpu")
        assert model.shardwise_stream.report().resident_units < len(model.shardwise_stream.units)
        assert precision == "bf16" or torch.equal(model(x), expected)
        with shardwise.gathered(model.parameters()):
            after = stored_tensors(model)
            for name, tensor in before.items():
                assert after[name].dtype == tensor.dtype
                assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8))
        # An origin that stays would hold the values a second time.
        assert not any(hasattr(param, ORIGIN) for param in [*model.parameters(), *stored_tensors(model).values()])
        model.shardwise_stream.close()


def test_a_model_of_quantised_weights_alone_is_streamed_once():
    model = nn.Module()
    model.weight = nn.Parameter(wrapped(torch.randn(8, 8)), requires_grad=False)
    shardwise.stream(model, "host", device="cpu")
    with pytest.raises(ConfigError, match="under an engine or a stream already"):
        shardwise.stream(model, "host", device="cpu")
    model.shardwise_stream.close()


@pytest.mark.programs
def test_a_process_may_end_without_close(tmp_path):
    """Threads that read ahead do not keep it, and nothing is said."""
    folder = save(make("dense"), tmp_path / "model")
    budget = budget_for(make("dense"), 5 * layer_bytes(make("dense")), 1, 8)
    script = f"""
import torch, shardwise
model = shardwise.stream({str(folder)!r}, "disk", device_memory={budget}, device="cpu", context=8)
assert "disk" in model.shardwise_stream.placement.tiers
model(torch.ones(1, 4, dtype=torch.long))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


# Errors, before anything runs


def test_a_stream_that_is_refused_leaves_the_model_trainable():
    model = chain()
    model[0].requires_grad_(False)
    before = [param.requires_grad for param in model.parameters()]
    with pytest.raises(ConfigError, match="one unit at a time takes"):
        shardwise.stream(model, "host", device_memory=unit_bytes() // 2, device="cpu")
    assert [param.requires_grad for param in model.parameters()] == before


@ranks(2)
def test_a_model_that_tensor_parallelism_has_cut_is_refused(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = parallelize_module(
        nn.Linear(8, 8), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), ColwiseParallel()
    )
    with pytest.raises(ConfigError, match="'weight' is a DTensor"):
        shardwise.stream(model, "host", device="cpu")


def test_wrong_arguments_are_named():
    for words, message in [
        ({"weights": "nvme"}, "weights is 'nvme'"),
        ({"device_memory": "much"}, "device_memory is 'much'"),
        ({"precision": "int3"}, "precision is 'int3'"),
        ({"kv": "disk"}, "kv is 'disk'"),
        ({"batch": 0}, "batch 0"),
        ({"device": "gpu7"}, "device is 'gpu7'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            shardwise.stream(chain(), **{"device": "cpu", **words})
    with pytest.raises(ConfigError, match="the model is a int: give a module"):
        shardwise.stream(5, device="cpu")
    with pytest.raises(ConfigError, match="one unit at a time takes"):
        shardwise.stream(chain(), "host", device_memory=unit_bytes() // 2, device="cpu")
    with pytest.raises(ConfigError, match="a module has none: pass the folder"):
        shardwise.stream(chain(), "disk", device_memory=2 * unit_bytes(), device="cpu")
    with pytest.raises(ConfigError, match="of host memory on each rank, and 1kB may be used"):
        shardwise.stream(chain(), "host", device_memory=2 * unit_bytes(), host_memory=1000, device="cpu")
    streamed = chained(3)
    with pytest.raises(ConfigError, match="under an engine or a stream already"):
        shardwise.stream(streamed, device="cpu")
    streamed.shardwise_stream.close()


def test_folders_that_are_not_whole_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config.json"):
        shardwise.stream(tmp_path, device="cpu")
    model = make("dense")
    folder = save(model, tmp_path / "model")
    file = folder / "model-1.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-5000])
    with pytest.raises(CheckpointError, match=r"model-1.safetensors cannot be read .* copy it again"):
        shardwise.stream(folder, "disk", device="cpu")
    file.write_bytes(whole)
    budget = budget_for(model, 10 * layer_bytes(model))
    with pytest.raises(ConfigError, match="is BF16 in"):
        shardwise.stream(folder, "disk", device_memory=budget, precision="fp32", device="cpu", context=8)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"has no .safetensors file"):
        shardwise.stream(folder, device="cpu")


def edited(folder, change=lambda tensors: tensors, **settings):
    """A folder of one file with other tensors, and other settings in its config.json. None removes one."""
    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}, file, {"format": "pt"})
    changed = {name: value for name, value in (config | settings).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(changed))
    return folder


def saved(model, folder):
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("weights", ["host", "disk"])
def test_names_in_files_that_the_model_lacks_are_ignored_and_logged(tmp_path, caplog, weights):
    model = make("dense")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"  # in old files of Llama
    folder = edited(saved(model, tmp_path), lambda tensors: {**tensors, name: torch.ones(4)})
    streamed = shardwise.stream(folder, weights, device="cpu")
    check_same(streamed, answers(model))
    assert f"has {name!r}, which LlamaForCausalLM ignores" in caplog.text
    streamed.shardwise_stream.close()


@pytest.mark.parametrize("weights", ["host", "disk", "auto"])
def test_what_files_lack_is_refused_and_not_drawn_at_random(tmp_path, weights):
    folder = edited(
        saved(make("dense"), tmp_path), lambda all: {k: v for k, v in all.items() if "layers.2.mlp" not in k}
    )
    with pytest.raises(CheckpointError, match=r"lacks 'model.layers.2.mlp.* and 2 more"):
        shardwise.stream(folder, weights, device="cpu")


def test_different_values_of_a_tied_parameter_are_refused(tmp_path):
    model = make("tied")
    both = saved(model, tmp_path / "both")
    edited(both, lambda all: {**all, "lm_head.weight": all["model.embed_tokens.weight"].clone()})
    streamed = shardwise.stream(both, "host", device="cpu")
    check_same(streamed, answers(model))
    streamed.shardwise_stream.close()
    edited(both, lambda all: {**all, "lm_head.weight": 2 * all["model.embed_tokens.weight"]})
    with pytest.raises(CheckpointError, match=r"different values for 'model.embed_tokens.weight' and 'lm_head.weight'"):
        shardwise.stream(both, "host", device="cpu")


def test_a_folder_that_names_no_dtype_computes_in_that_of_its_files(tmp_path):
    model = make("dense")
    streamed = shardwise.stream(edited(saved(model, tmp_path), dtype=None), "disk", device="cpu")
    check_same(streamed, answers(model))
    streamed.shardwise_stream.close()


def test_parameters_that_transformers_keeps_in_fp32(tmp_path):
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    transformers.T5ForConditionalGeneration(config).half().save_pretrained(tmp_path)
    resident = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path, dtype="auto").eval()
    assert resident.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == torch.float32
    words = {"input_ids": prompts(), "decoder_input_ids": prompts(1)}
    streamed = shardwise.stream(tmp_path, "host", device="cpu")
    with torch.no_grad():
        assert torch.equal(streamed(**words).logits, resident(**words).logits)
    streamed.shardwise_stream.close()


def test_a_folder_of_quantised_weights_is_left_to_transformers(tmp_path):
    folder = edited(saved(make("dense"), tmp_path), quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ConfigError, match=r"holds weights that gptq has quantized.*take weights='host'"):
        shardwise.stream(folder, "disk", device="cpu")
    with pytest.raises(ConfigError, match=rf"transformers cannot load {folder} \("):  # without the package for it
        shardwise.stream(folder, "host", device="cpu")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "unheard"}, "cannot read the configuration of .*`unheard`.*build the model in Python"),
        ({"model_type": None}, "Should have a `model_type` key"),
        ({"model_type": "x", "auto_map": {"AutoConfig": "code.Config"}}, "contains custom code"),
        ({"hidden_size": "large"}, "'hidden_size' expected int"),
        ({"hidden_act": "unheard"}, "cannot build"),
    ],
)
def test_a_configuration_that_transformers_refuses_is_one_sentence(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message) as error:
        shardwise.stream(edited(saved(make("dense"), tmp_path), **settings), device="cpu")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("file", "message"),
    [("adapter_config.json", "holds a PEFT adapter"), ("model_index.json", "pipeline of diffusers")],
)
def test_folders_of_other_libraries_are_named(tmp_path, file, message):
    (tmp_path / file).write_text("{}")
    with pytest.raises(CheckpointError, match=message):
        shardwise.stream(tmp_path, device="cpu")


@ranks(2)
def test_a_folder_that_one_rank_lacks_is_an_error_on_all_of_them(rank, world_size, tmp_path):
    if rank == 0:
        save(make("dense"), tmp_path / "model")
    torch.distributed.barrier()
    message = r"has no config.json" if rank == 1 else r"^rank 1: .* has no config.json"
    with pytest.raises(CheckpointError, match=message):
        shardwise.stream(tmp_path / ("model" if rank == 0 else "elsewhere"), device="cpu")


def from_disk(model, folder, layers=5):
    """The model streamed from a folder of its weights, with one sequence of 8 tokens at most."""
    budget = budget_for(model, layers * layer_bytes(model), 1, 8)
    return shardwise.stream(folder, "disk", device_memory=budget, device="cpu", context=8)


def rewritten(file, contents):
    """Write to a file in place, at another time than before."""
    file.write_bytes(contents)
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))


def changes(contents):
    """A safetensors file with other values in its last tensors; cut short; and with bytes after its end."""
    return [contents[:-512] + bytes(512), contents[:-512], contents[:4096], contents + bytes(512)]


@pytest.mark.parametrize("number", range(4))
def test_a_file_that_is_changed_while_it_is_used(tmp_path, number):
    model = make("dense")
    folder = save(model, tmp_path / "model")
    streamed, expected = from_disk(model, folder), model(prompts()[:1]).logits
    assert torch.equal(streamed(prompts()[:1]).logits, expected)
    file = folder / "model-1.safetensors"
    whole, written_ns = file.read_bytes(), file.stat().st_mtime_ns
    rewritten(file, changes(whole)[number])
    for _ in range(2):
        with pytest.raises(
            DiskError, match=r"model-1.safetensors was overwritten or cut short .* shardwise.stream again"
        ):
            streamed(prompts()[:1])
    file.write_bytes(whole)
    os.utime(file, ns=(0, written_ns))  # restored with its time, as `cp -p` does: nothing has changed
    assert torch.equal(streamed(prompts()[:1]).logits, expected)
    assert streamed.shardwise_stream.report().weights_peak_bytes <= streamed.shardwise_stream.placement.device_bytes
    streamed.shardwise_stream.close()


def test_a_file_that_is_replaced_while_it_is_used_is_read_as_it_was(tmp_path):
    model = make("dense")
    folder = save(model, tmp_path / "model")
    streamed = from_disk(model, folder)
    for name in ("model-0.safetensors", "model-1.safetensors"):
        (tmp_path / "new").write_bytes((folder / name).read_bytes()[:4096])
        (tmp_path / "new").rename(folder / name)
    check = model(prompts()[:1]).logits
    for _ in range(2):
        assert torch.equal(streamed(prompts()[:1]).logits, check)
    streamed.shardwise_stream.close()


# The arithmetic


def test_what_travels_is_spread_evenly():
    assert [sorted(spread(count, 12)) for count in (1, 2, 4)] == [[6], [3, 9], [1, 4, 7, 10]]
    assert [len(spread(count, 12)) for count in range(13)] == list(range(13))
    assert window_bytes([3, 1, 1, 4], 1) == 7  # from the last on to the first


def test_more_memory_never_fetches_more():
    units = [UnitSize("root", 10, 10, stays=True), UnitSize("embed", 60, 60, uses=2)]
    units += [UnitSize(f"layers.{number}", 100, 50) for number in range(20)]
    fetched = []
    for budget in range(110, 2200, 7):
        found = place(units, "host", budget)
        assert found.device_bytes <= budget
        assert found.tiers[0] == "device"
        if found.ahead > 1:  # with less room, one unit ahead leaves more of it for others
            fetched.append(found.fetched_bytes)
    assert fetched == sorted(fetched, reverse=True)
    assert fetched[-1] == 0
    found = place(units, "disk", 500, host_bytes=320)
    assert found.bytes_on("host") <= 320
    assert {"device", "host", "disk"} == set(found.tiers)
