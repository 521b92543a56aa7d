"""Habits from plain torch, DDP and other libraries: each is right, refused, or warned about once."""

import copy
import pickle

import pytest
import torch
from torch import nn

import shardwise
from shardwise.errors import HabitWarning, ModelChangedError
from support import ranks
from support.training import make_batch, make_sgd, start, train_step

PRESETS = ["zero1", "zero3"]


def notices(caught):
    return [str(warning.message) for warning in caught if issubclass(warning.category, HabitWarning)]


# torch.autocast, and model(x) instead of engine(x)


class Probe(nn.Module):
    """Two layers that remember the dtypes they computed in."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.seen = []

    def forward(self, x):
        y = self.second(torch.tanh(self.first(x)))
        self.seen.append((x.dtype, y.dtype))
        return y


def on_probe(precision, preset="zero1"):
    model = Probe()
    return shardwise.initialize(model, make_sgd(model), {"preset": preset, "precision": precision})


@ranks(1, 2)
@pytest.mark.parametrize("preset", PRESETS)
def test_an_outer_autocast_is_honoured(rank, world_size, preset):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    weights = []
    for how in ("outer", "configured"):
        engine = on_probe({"compute": "bf16", "autocast": True} if how == "configured" else {}, preset)
        for _ in range(2):
            # All of the step inside: autocast keeps casts of the weights until it ends.
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "outer"):
                engine.backward(engine(x).float().square().mean())
                engine.step()
        assert set(engine.module.seen) == {(torch.float32, torch.bfloat16)}
        weights.append(engine.full_param("first.weight"))
        engine.destroy()
    assert torch.equal(*weights)


def test_an_outer_autocast_that_contradicts_the_configuration_is_refused():
    x = torch.randn(4, 8)
    for precision in ({"compute": "bf16"}, {"compute": "bf16", "autocast": True}):
        engine = on_probe(precision)
        with torch.autocast("cpu", torch.float16), pytest.raises(shardwise.ConfigError, match="give both the same"):
            engine(x)
        engine.backward(engine(x).float().sum())
        engine.destroy()
    engine = on_probe({})
    with torch.autocast("cpu", torch.float16), pytest.raises(shardwise.ConfigError, match="and leave torch"):
        engine(x)
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        assert engine(x).dtype == torch.float16
    engine.destroy()


@ranks(1, 2)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("precision", [{"compute": "bf16"}, {"compute": "bf16", "autocast": True}])
def test_calling_the_model_is_calling_the_engine(rank, world_size, preset, precision):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    weights = []
    for how in ("engine", "model"):
        engine = on_probe(precision, preset)
        call = engine if how == "engine" else engine.module
        for _ in range(2):
            engine.backward(call(x).float().square().mean())
            engine.step()
        weights.append(engine.full_param("first.weight"))
        with torch.no_grad():
            weights.append(call(x))
        seen = torch.float32 if precision.get("autocast") else torch.bfloat16
        assert set(engine.module.seen) == {(seen, torch.bfloat16)}
        engine.destroy()
        assert not {"_call_impl", "_compiled_call_impl"} & vars(engine.module).keys()
    assert torch.equal(weights[0], weights[2])
    assert torch.equal(weights[1], weights[3])


@ranks(2)
@pytest.mark.parametrize("preset", PRESETS)
def test_an_exception_in_a_direct_call_leaves_the_engine_at_rest(rank, world_size, preset):
    engine = start("mlp", {"preset": preset})
    expected = [train_step(engine, rank, step) for step in range(2)]
    engine.destroy()
    engine = start("mlp", {"preset": preset})
    hook = engine.module.layers[1].register_forward_hook(lambda *_: 1 / 0)
    for call in (engine, engine.module):
        with pytest.raises(ZeroDivisionError):
            call(make_batch(engine.module, rank, 0))
    hook.remove()
    assert [train_step(engine, rank, step) for step in range(2)] == expected
    engine.destroy()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_model_that_is_recomputed_or_calls_itself(preset):
    from torch.utils.checkpoint import checkpoint

    x, weights = torch.randn(4, 8), []
    for recomputed in (False, True):
        engine = on_probe({"compute": "bf16"}, preset)
        out = checkpoint(engine.module, x, use_reentrant=False) if recomputed else engine(x)
        engine.backward(out.float().square().mean())
        engine.step()
        weights.append(engine.full_param("first.weight"))
        engine.destroy()
    assert torch.equal(*weights)


def test_copies_of_a_model_have_their_own_call():
    engine = on_probe({"compute": "bf16"})
    for plain in (copy.deepcopy(engine.module), pickle.loads(pickle.dumps(engine.module))):
        assert "_call_impl" not in vars(plain)
        assert plain.float()(torch.randn(4, 8)).dtype == torch.float32
    engine.destroy()


@pytest.mark.parametrize("how", ["before", "after", "engine", "wrapped"])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_model_compiled_as_a_whole_keeps_its_precision(how, preset):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model, x = Probe(), torch.randn(4, 8)
    if how == "before":
        model.compile(backend="aot_eager")
    engine = shardwise.initialize(model, make_sgd(model), {"preset": preset, "precision": {"compute": "bf16"}})
    if how == "after":
        model.compile(backend="aot_eager")
    call = engine if how == "engine" else model
    if how in ("engine", "wrapped"):
        call = torch.compile(call, backend="aot_eager")
    for _ in range(2):
        out = call(x)
        assert out.dtype == torch.bfloat16
        engine.backward(out.float().square().mean())
        engine.step()
    assert counters["frames"]["ok"] >= 1
    plain = on_probe({"compute": "bf16"}, preset)
    for _ in range(2):
        plain.backward(plain(x).float().square().mean())
        plain.step()
    torch.testing.assert_close(engine.full_param("first.weight"), plain.full_param("first.weight"))
    engine.destroy()
    plain.destroy()


# A model that changes under its engine


@ranks(1, 2)
@pytest.mark.parametrize("preset", PRESETS)
def test_new_trainable_parameters_are_named(rank, world_size, preset):
    engine = on_probe({}, preset)
    engine.module.extra = nn.ReLU()
    engine.module.register_parameter("frozen", nn.Parameter(torch.zeros(8), requires_grad=False))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    engine.backward(engine(x).square().mean())
    engine.step()
    engine.module.second = nn.Linear(8, 8)
    engine.backward(engine(x).square().mean())
    for _ in range(2):
        with pytest.raises(ModelChangedError, match=r"'second.weight' and 1 more parameters are .* before shardwise"):
            engine.step()
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("preset", PRESETS)
def test_rebound_parameters_are_refused_or_kept(rank, world_size, preset):
    engine = on_probe({"compute": "bf16"}, preset)
    x, weight = torch.randn(4, 8), engine.module.first.weight
    with shardwise.gathered(weight, write=True):
        weight.data = torch.full_like(weight, 0.5)
    assert engine.full_param("first.weight").eq(0.5).all()
    with pytest.raises(ModelChangedError, match="resize before"), shardwise.gathered(weight, write=True):
        weight.data = torch.zeros(9, 8, dtype=torch.bfloat16)
    engine.destroy()
    engine = on_probe({}, preset)
    engine.backward(engine(x).square().mean())
    attempt = engine.step
    if preset == "zero1":
        engine.module.first.weight.data = torch.zeros(8, 8)
    else:
        attempt = partial(setattr, engine.module.first.weight, "data", torch.zeros(8, 8))
    with pytest.raises(RuntimeError, match=r"inside `with shardwise.gathered\(params, write=True\):`"):
        attempt()
    engine.destroy()


def adapted():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(Probe(), peft.LoraConfig(target_modules=["first", "second"], init_lora_weights=False))
    return model, torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)


@ranks(2)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("safe", [False, True])
def test_adapters_merge_under_an_engine(rank, world_size, preset, safe):
    model, optimizer = adapted()
    engine = shardwise.initialize(model, optimizer, preset)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    engine.backward(engine(x).square().mean())
    engine.step()
    plain = copy.deepcopy(model)
    before = engine(x)
    model.merge_adapter(safe_merge=safe)
    torch.testing.assert_close(engine(x), before)
    plain.merge_adapter()
    name = "base_model.model.first.base_layer.weight"
    assert torch.equal(engine.full_param(name), plain.get_parameter(name).detach())
    model.unmerge_adapter()
    torch.testing.assert_close(engine(x), before)
    engine.backward(engine(x).square().mean())
    engine.step()
    with pytest.raises(ModelChangedError, match=r"copy.deepcopy\(engine.module\).merge_and_unload\(\)"):
        model.merge_and_unload()
    merged = copy.deepcopy(model).merge_and_unload()
    torch.testing.assert_close(merged(x), engine(x))
    engine.destroy()
    assert "merge_adapter" not in vars(model.base_model)


@ranks(2)
@pytest.mark.parametrize("preset", PRESETS)
def test_adapters_added_afterwards_are_named(rank, world_size, preset):
    peft = pytest.importorskip("peft")
    engine = on_probe({}, preset)
    model = peft.get_peft_model(engine.module, peft.LoraConfig(target_modules=["first"]))
    engine.backward(model(torch.randn(4, 8)).square().mean())
    with pytest.raises(ModelChangedError, match=r"'first.lora_A.default.weight' and 1 more"):
        engine.step()
    engine.destroy()
