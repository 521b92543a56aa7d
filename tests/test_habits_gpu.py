"""Habits on CUDA: `pytest -m gpu tests/test_habits_gpu.py`."""

import warnings

import pytest
import torch
from torch import nn

import shardwise
from shardwise.errors import HabitWarning
from shardwise.optim.probe import Scope, scope_of
from support import run_ranks
from support.training import make_sgd
from test_habits import Probe
from test_optimizers import Lamb, Sign

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(preset, precision):
    model = Probe().cuda()
    return shardwise.initialize(model, make_sgd(model), {"preset": preset, "precision": precision})


@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_an_outer_autocast_is_honoured(preset):
    x, weights = torch.randn(4, 8, device="cuda"), []
    for precision in ({}, {"compute": "bf16", "autocast": True}):
        engine = on_gpu(preset, precision)
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16, enabled=not precision):
                engine.backward(engine.module(x).float().square().mean())
                engine.step()
        weights.append(engine.full_param("first.weight"))
        engine.destroy()
    assert torch.equal(*weights)


@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_a_model_stays_on_the_gpu_with_a_warning(preset):
    """Lightning and many scripts end with `model.cpu()`."""
    engine = on_gpu(preset, {})
    before = engine.full_param("first.weight")
    for target in (engine.module, engine.module.first):
        with pytest.warns(HabitWarning, match="stays on its device"):
            assert target.cpu() is target
    with pytest.raises(RuntimeError, match="cannot become float16"):
        engine.module.to("cpu", torch.float16)
    assert torch.equal(engine.full_param("first.weight"), before)
    engine.backward(engine(torch.randn(4, 8, device="cuda")).square().mean())
    engine.step()
    assert not torch.equal(engine.full_param("first.weight"), before)
    engine.destroy()


def test_optimizers_are_tried_on_the_gpu():
    params = [nn.Parameter(torch.randn(3, 4, device="cuda"))]
    state = torch.cuda.get_rng_state()
    made = {Lamb(params): Scope.TENSOR, Sign(params): Scope.ELEMENT}
    made[type("Own", (torch.optim.AdamW,), {})(params, fused=True)] = Scope.ELEMENT
    for optimizer, scope in made.items():
        assert scope_of(optimizer, optimizer.param_groups[0], torch.device("cuda", 0)) is scope
    assert torch.equal(torch.cuda.get_rng_state(), state)


def same_data(rank, world_size):
    torch.cuda.set_device(0)
    engine = on_gpu("zero3", {"compute": "bf16"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(12):
            x = torch.randn(4, 8, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
            engine.backward(engine(x).float().square().mean())
            engine.step()
    said = [warning for warning in caught if issubclass(warning.category, HabitWarning)]
    assert len(said) == (rank == 0)
    engine.destroy()


def test_ranks_with_the_same_data_are_told():
    run_ranks(same_data, 2, fresh=True)
