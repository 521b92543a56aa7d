"""Frozen quantised bases: parameters of any dtype, and parameters that consist of several tensors, under adapters."""

import copy
import functools
import gc

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import shardwise
from shardwise.errors import CheckpointError, ConfigError
from shardwise.observe import StorageObserver
from shardwise.partition.units import divide
from support import ranks, run_ranks

WIDTH, BLOCKS, STEPS = 24, 3, 3
PRESETS = ["zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"]
DTYPES = {"fp32": [torch.uint8, torch.bool], "bf16": [torch.int8, torch.int16, torch.float8_e4m3fn]}


class Wrapped(torch.Tensor):
    """A weight in 8 bits with a scale for each row, as torchao's tensors are made."""

    @staticmethod
    def __new__(cls, values, scale):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype, device=scale.device)

    def __init__(self, values, scale):
        self.values, self.scale = values, scale

    def __tensor_flatten__(self):
        return ["values", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, size, stride):
        return cls(inner["values"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.clone.default):
            return cls(func(args[0].values), func(args[0].scale))
        if func is aten.copy_.default:
            args[0].values.copy_(args[1].values)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        return func(*[each.plain() if isinstance(each, cls) else each for each in args], **(kwargs or {}))

    def plain(self):
        return self.values.to(self.scale.dtype) * self.scale


class Quantized(nn.Module):
    """A linear layer on a quantised weight, and an adapter beside it."""

    def __init__(self, make):
        super().__init__()
        self.weight = nn.Parameter(make(torch.randn(WIDTH, WIDTH)), requires_grad=False)
        self.norm = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
        self.down = nn.Parameter(torch.randn(WIDTH, 2) * 0.1)
        self.up = nn.Parameter(torch.zeros(2, WIDTH))

    def forward(self, x):
        weight = self.weight if isinstance(self.weight, Wrapped) else self.weight.to(x.dtype)
        return x + torch.tanh((x @ weight.to(x.dtype)) * 0.02 * self.norm.to(x.dtype) + x @ self.down @ self.up)


def quantized(dtype, values):
    return values > 0 if dtype is torch.bool else (values * 20).clamp(-100, 100).abs().to(dtype)


def of_dtype(dtype):
    return functools.partial(quantized, dtype)


def wrapped(values):
    scale = values.abs().amax(1, keepdim=True) / 127
    return Wrapped((values / scale).round().to(torch.int8), scale)


def build(make):
    torch.manual_seed(3)
    return nn.Sequential(*(Quantized(make) for _ in range(BLOCKS)))


def start(make, preset, compute="fp32", model=None):
    model = model or build(make)
    trained = [param for param in model.parameters() if param.requires_grad]
    config = {"preset": preset, "precision": {"compute": compute}, "gradients": {"order": "sharded"}}
    return shardwise.initialize(model, torch.optim.AdamW(trained, lr=1e-2), config)


def train(engine, rank, steps=range(STEPS)):
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        loss = engine(torch.randn(4, WIDTH, generator=generator)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def raw(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


@ranks(2)
@pytest.mark.parametrize("compute", DTYPES)
def test_a_base_of_any_dtype_trains_alike_in_every_stage_and_is_untouched(rank, world_size, compute):
    for dtype in DTYPES[compute]:
        base = {name: raw(param) for name, param in build(of_dtype(dtype)).named_parameters() if "weight" in name}
        seen = []
        for preset in PRESETS:
            engine = start(of_dtype(dtype), preset, compute)
            seen.append(train(engine, rank))
            assert all(torch.equal(raw(engine.full_param(name)), value) for name, value in base.items())
            assert {engine.module.get_parameter(name).dtype for name in base} == {dtype}
            engine.destroy()
        assert all(losses == seen[0] for losses in seen), (dtype, dict(zip(PRESETS, seen, strict=True)))


@ranks(2)
def test_parameters_of_several_tensors_train_alike_in_every_stage(rank, world_size):
    seen = []
    for preset in PRESETS:
        if rank == 1:
            torch.manual_seed(4)
        engine = start(wrapped, preset, "bf16")
        seen.append(train(engine, rank))
        plain = build(wrapped)
        for block, before in zip(engine.module, plain, strict=True):
            with shardwise.gathered(block.weight):
                assert torch.equal(block.weight.values, before.weight.values)
                assert torch.equal(block.weight.scale, before.weight.scale)
                assert block.weight.scale.dtype is torch.float32
            assert is_traceable_wrapper_subclass(block.weight)
        engine.destroy()
    assert all(losses == seen[0] for losses in seen), dict(zip(PRESETS, seen, strict=True))


@ranks(2)
@pytest.mark.parametrize("make", [of_dtype(torch.int8), wrapped], ids=["int8", "wrapped"])
def test_it_rests_sharded_in_its_own_dtype(rank, world_size, make):
    engine = start(make, "zero3", "bf16")
    train(engine, rank)
    units = [unit for unit in engine.units if any(name.endswith(("weight", "values")) for name in unit.names)]
    assert len(units) == BLOCKS
    for unit in units:
        assert unit.weights.full_bytes < WIDTH * WIDTH + 512  # padding; bf16 would be twice that
        assert unit.weights.master.nbytes == unit.weights.full_bytes // world_size
    inside = {name for spec in divide(build(make)) for name in spec.params}
    assert inside == {name for unit in engine.units for name in unit.names}
    # Resting weights: what the ledger holds is half of what the tensors take, and padding.
    frozen = [unit for unit in engine.units if not unit.is_trainable]
    held = sum(size for entry, size in engine._ledger.live.items() if entry.unit in {unit.name for unit in frozen})
    whole = sum(unit.weights.full_bytes for unit in frozen)
    assert held == whole // world_size
    engine.destroy()


@ranks(2)
def test_checkpoints_and_copies_have_whole_values(rank, world_size, tmp_path):
    for make in (of_dtype(torch.float8_e4m3fn), wrapped):
        folder = tmp_path / str(make is wrapped)
        engine = start(make, "zero3")
        train(engine, rank)
        engine.save(folder)
        state, copied = engine.state_dict(), copy.deepcopy(engine.module)
        rest = train(engine, rank, range(STEPS, 5))
        engine.destroy()
        before = build(make)
        for index in range(BLOCKS):
            expected = before[index].weight
            for weight in (state[f"{index}.weight"], copied[index].weight):
                if make is wrapped:
                    assert torch.equal(weight.values, expected.values)
                    assert torch.equal(weight.scale, expected.scale)
                else:
                    assert torch.equal(raw(weight), raw(expected))
        for preset in ("zero1", "zero3_offload"):
            engine = start(make, preset)
            engine.load(folder)
            assert train(engine, rank, range(STEPS, 5)) == rest
            engine.destroy()


def test_a_checkpoint_loads_at_another_world_size(tmp_path):
    run_ranks(save_on_ranks, 2, str(tmp_path))
    engine = start(wrapped, "zero3")
    with shardwise.gathered(engine.module.parameters(), write=True), torch.no_grad():
        for block in engine.module:
            block.weight.values.zero_()
    engine.load(tmp_path)
    for block, before in zip(engine.module, build(wrapped), strict=True):
        assert torch.equal(block.weight.values, before.weight.values)
    engine.destroy()


class WithLoss(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.blocks = build(make)

    def forward(self, x):
        return self.blocks(x).float().square().mean()


@pytest.mark.parametrize("make", [of_dtype(torch.int8), wrapped], ids=["int8", "wrapped"])
def test_a_plan_counts_what_a_step_sends_and_holds(make):
    def built():
        return WithLoss(make), lambda rank, step: {"x": torch.ones(4, WIDTH)}

    config = {"preset": "zero3", "precision": {"compute": "bf16"}}
    foreseen = shardwise.foresee(built, config, world_size=2, device="cpu")
    sent, peak = max(run_ranks(step_on_ranks, 2, make, config))
    assert foreseen.sent_bytes["gather"] == sent
    assert foreseen.peak_bytes == pytest.approx(peak, rel=0.01)


def step_on_ranks(rank, world_size, make, config):
    gc.collect()
    with StorageObserver() as memory:
        before_bytes = memory.current_bytes
        model = WithLoss(make)
        trained = [param for param in model.parameters() if param.requires_grad]
        engine = shardwise.initialize(model, torch.optim.AdamW(trained, lr=1e-3), config)
        for _ in range(4):
            gc.collect()
            memory.reset_peak()
            before = engine.comm.sent_bytes["gather"]
            loss = engine(torch.ones(4, WIDTH))
            engine.backward(loss)
            del loss
            engine.step()
        sent = engine.comm.sent_bytes["gather"] - before
        peak = memory.peak_bytes - before_bytes
    engine.destroy()
    return sent, peak


def save_on_ranks(rank, world_size, folder):
    engine = start(wrapped, "zero3")
    train(engine, rank)
    engine.save(folder)
    engine.destroy()


def test_what_cannot_be_trained_or_exported_is_refused(tmp_path):
    model = build(wrapped)
    engine = start(wrapped, "zero2")
    with pytest.raises(CheckpointError, match=r"'0\.weight' is quantised \(Wrapped\)"):
        engine.export(tmp_path / "out")
    engine.destroy()
    model[0].weight.requires_grad_()
    with pytest.raises(ConfigError, match=r"'0\.weight' is a Wrapped that requires gradients"):
        start(wrapped, "zero3", model=model)


def test_the_tensors_of_a_quantised_parameter_are_named():
    engine = start(wrapped, "zero3")
    with pytest.raises(KeyError, match=r"'0.weight' is quantised .* ask for 0.weight.values or 0.weight.scale"):
        engine.full_param("0.weight")
    assert engine.full_param("0.weight.values").dtype == torch.int8
    engine.destroy()
