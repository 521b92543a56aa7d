"""Deferred initialisation: the same training, little memory, and weights read from files."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shardwise
from shardwise.deferred import pretrained
from shardwise.deferred.deferred import DeferredSession
from shardwise.deferred.recording import recording
from shardwise.models.built_in import GPT
from shardwise.observe import StorageObserver
from support import matrix, ranks
from support.training import digest, make_model, make_optimizer, train, train_step

STAGES = ["zero0", "zero1", "zero2", "zero3"]


@ranks()
@matrix(
    {
        "world_size": [1, 2, 3],
        "preset": STAGES,
        "model": ["gpt", "tied", "odd"],
        "precision": ["fp32", "bf16"],
        "small_bytes": [0, 300],
    }
)
def test_training_is_that_of_a_model_built_ordinarily(rank, world_size, preset, model, precision, small_bytes):
    config = {"preset": preset, "precision": {"compute": precision}}
    expected = train(model, config, rank, steps=2)

    with recording(DeferredSession(torch.device("cpu")), small_bytes=small_bytes):  # deferred_init with another size
        built = make_model(model)
    assert any(param.is_meta for param in built.parameters())
    engine = shardwise.initialize(built, make_optimizer(built), config)
    assert not any(buffer.is_meta for buffer in built.buffers())
    for step in range(2):
        train_step(engine, rank, step)
        assert digest(engine) == expected[step]
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_rank_0_counts_where_seeds_differ(rank, world_size, preset):
    torch.manual_seed(0)
    expected = nn.Linear(100, 100)
    torch.manual_seed(rank)
    with shardwise.deferred_init():
        model = nn.Linear(100, 100)
    engine = shardwise.initialize(model, torch.optim.SGD(model.parameters()), preset)
    for name, param in expected.named_parameters():
        assert torch.equal(engine.full_param(name), param.detach())
    engine.destroy()


class Tower(nn.Module):
    """Ten layers of 1 MiB each, initialised twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(10))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=0.01)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@ranks()
@matrix({"world_size": [2, 4], "precision": ["fp32", "bf16"], "source": ["made", "read"]})
def test_the_start_takes_the_shard_and_two_units(rank, world_size, precision, source, tmp_path):
    path = tmp_path / f"{rank}.safetensors"
    save_file({name: param.detach() for name, param in Tower().named_parameters()}, path)
    with StorageObserver(existing=()) as observer:
        with shardwise.deferred_init(path if source == "read" else None):
            model = Tower()
        config = {"preset": "zero3", "precision": {"compute": precision}}
        engine = shardwise.initialize(model, torch.optim.AdamW(model.parameters()), config)
        unit_bytes = 512 * 512 * 4
        assert len(engine.units) == 10
        assert observer.current_bytes <= 10 * unit_bytes / world_size + 4096
        # 20 generator states of 5 kB each, twice: those recorded, and those received from rank 0.
        states_bytes = 2 * 20 * 5056 if source == "made" else 0
        assert observer.peak_bytes <= 10 * unit_bytes / world_size + 2 * unit_bytes + states_bytes + 4096
    engine.destroy()


class Attached(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(90, 90), nn.Linear(90, 90)
        self.register_buffer("lasting", torch.arange(8100.0).view(90, 90))
        self.register_buffer("passing", torch.eye(90), persistent=False)
        self.plain = torch.full((90, 90), 0.25)
        self.second.register_buffer("same", self.passing)

    def forward(self, x):
        return self.second(self.first(x) @ self.lasting @ self.passing @ self.plain).mean()


def test_buffers_and_plain_tensors_get_their_values():
    torch.manual_seed(1)
    plain = Attached()
    torch.manual_seed(1)
    with shardwise.deferred_init():
        model = Attached()
    model.first.weight.note = "kept"
    weight = model.first.weight
    engine = shardwise.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero3")
    assert model.first.weight is weight
    assert weight.note == "kept"
    assert model.second.same is model.passing
    x = torch.randn(4, 90)
    assert torch.equal(engine(x), plain(x))
    engine.destroy()


# Weights from files


def write(folder, tensors, files=1):
    """One file, or several with an index."""
    folder.mkdir(exist_ok=True)
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names = {name: f"model-{number % files}.safetensors" for number, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in tensors if names[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def make_gpt(seed, tied=True):
    torch.manual_seed(seed)
    return GPT(hidden=32, layers=3, heads=2, vocabulary=61, length=16, tied=tied)


@ranks(2)
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
def test_weights_are_read_from_files(rank, world_size, preset, files, kept, tmp_path):
    source = make_gpt(5)
    tensors = {name: value.to(torch.bfloat16) for name, value in source.state_dict().items()}
    del tensors["embed.weight" if kept == "head.weight" else "head.weight"]
    write(tmp_path / str(rank), tensors, files)
    with shardwise.deferred_init(tmp_path / str(rank)):
        model = GPT(hidden=32, layers=3, heads=2, vocabulary=61, length=16, tied=True)
    engine = shardwise.initialize(model, torch.optim.AdamW(model.parameters()), preset)
    for name, param in source.named_parameters():
        assert torch.equal(engine.full_param(name), param.detach().bfloat16().float()), name
    assert not pretrained._opened.cache_info().currsize
    train_step(engine, rank, 0)
    engine.destroy()


@pytest.mark.full  # transformers takes seconds to import
def test_a_model_of_transformers_is_built_and_read(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is the extra hf")
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, vocab_size=500
    )
    torch.manual_seed(1)
    source = transformers.AutoModelForCausalLM.from_config(config)
    source.save_pretrained(tmp_path, max_shard_size="500KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    tokens = torch.randint(500, (2, 12))
    for weights in (None, tmp_path):
        torch.manual_seed(1 if weights is None else 2)
        with shardwise.deferred_init(weights):
            model = transformers.AutoModelForCausalLM.from_config(config)
        engine = shardwise.initialize(model, torch.optim.AdamW(model.parameters()), "zero3")
        with torch.no_grad():
            assert torch.equal(engine(tokens).logits, source(tokens).logits)
        engine.destroy()


def test_buffers_are_read_too_unless_they_do_not_last(tmp_path):
    source = Attached()
    source.lasting.add_(1)
    write(tmp_path, {**source.state_dict(), "passing": torch.zeros(90, 90)})
    with shardwise.deferred_init(tmp_path / "model.safetensors"):
        model = Attached()
    engine = shardwise.initialize(model, torch.optim.SGD(model.parameters()), "zero2")
    assert torch.equal(model.lasting, source.lasting)
    assert torch.equal(model.passing, torch.eye(90))
    engine.destroy()


@ranks(2)
def test_each_rank_reads_its_own_rows(rank, world_size, tmp_path):
    path = tmp_path / f"{rank}.safetensors"
    save_file({name: param.detach() for name, param in Tower().named_parameters()}, path)
    reads = []
    read = pretrained.PretrainedTensor.read
    pretrained.PretrainedTensor.read = lambda self, part, tp: reads.append(part.numel) or read(self, part, tp)
    try:
        with shardwise.deferred_init(path):
            model = Tower()
        shardwise.initialize(model, torch.optim.SGD(model.parameters()), "zero3").destroy()
    finally:
        pretrained.PretrainedTensor.read = read
    assert sum(reads) == 10 * 512 * 512 // world_size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("norm.weight"),
            r"lacks 'norm.weight' \(nearest: .*\), which the model needs",
        ),
        (
            lambda tensors: tensors.update(nrom=torch.ones(1)),
            r"has 'nrom'.*which the model does not have.*strict=False",
        ),
        (
            lambda tensors: tensors.update({"norm.bias": torch.ones(3)}),
            r"'norm.bias' has shape \(3,\) in .*but \(32,\)",
        ),
    ],
    ids=["missing", "unexpected", "shape"],
)
def test_files_that_do_not_fit_are_refused(change, message, tmp_path):
    tensors = make_gpt(0, tied=False).state_dict()
    change(tensors)
    write(tmp_path, tensors)
    with shardwise.deferred_init(tmp_path):
        model = make_gpt(0, tied=False)
    with pytest.raises(ValueError, match=message):
        shardwise.initialize(model, torch.optim.SGD(model.parameters()), "zero3")


def test_what_a_file_has_besides_can_be_passed_over(tmp_path):
    write(tmp_path, {**make_gpt(0, tied=False).state_dict(), "other": torch.ones(1)})
    with shardwise.deferred_init(tmp_path, strict=False):
        model = make_gpt(1, tied=False)
    shardwise.initialize(model, torch.optim.SGD(model.parameters()), "zero3").destroy()


def test_paths_that_hold_no_weights_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.safetensors").write_bytes(b"12345678 no header")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "out.json").write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    for name, message in [
        ("nowhere", "there is no"),
        ("empty", "holds neither"),
        ("broken.safetensors", "cannot be read as safetensors"),
        ("list.json", "is not an index"),
        ("out.json", "not a file beside it"),
    ]:
        with pytest.raises(ValueError, match=message), shardwise.deferred_init(tmp_path / name):
            pass


# When something goes wrong


def test_parameters_without_values_are_refused():
    model = nn.Linear(4, 4, device="meta")
    with pytest.raises(shardwise.ConfigError, match=r"'weight' is on the meta device.*deferred_init"):
        shardwise.initialize(model, torch.optim.SGD(model.parameters()), "zero1")
    with shardwise.deferred_init():
        model = nn.Linear(100, 100)
    model.half()  # after the context: not recorded
    with pytest.raises(shardwise.ConfigError, match=r"cast \(model.to\(dtype\)\)"):
        shardwise.initialize(model, torch.optim.SGD(model.parameters()), "zero1")
