"""What users do to gradients: clip, drop, read, set. Each works as in plain torch, or an error says what to write."""

import warnings

import pytest
import torch
from torch import nn

from shardwise.errors import GradientError, HabitWarning, ModelChangedError
from support import ranks
from support.awkward import WIDTH, Chain, square
from support.chain import assert_same, begin, data, weights
from support.conduct import conduct
from support.training import make_optimizer, make_sgd

STAGES = ["zero0", "zero1", "zero2", "zero3"]
SHARDED = {"gradients": {"order": "sharded"}}
CLIP = 0.05


def loss_of(engine, rank, step=0):
    return square(None, engine(data(rank, step)), None)


def plain_norm(world_size):
    """The norm of the mean over the ranks, in plain torch."""
    torch.manual_seed(3)
    model = Chain()
    sum(square(None, model(data(rank)), None) / world_size for rank in range(world_size)).backward()
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()


@ranks(1, 2)
@pytest.mark.parametrize("preset", [*STAGES, "zero2_offload"])
def test_clip_grad_norm_clips_as_the_configuration_does(rank, world_size, preset):
    """Between a backward and `step()`; the smaller of both limits counts."""
    ends = []
    for limit, clip in [(CLIP, None), (None, CLIP), (CLIP, 9.0), (9.0, CLIP)]:
        engine = begin(preset, gradients={"clip_norm": limit})
        for step in range(2):
            engine.backward(loss_of(engine, rank, step))
            if clip is not None:
                norm = engine.clip_grad_norm_(clip)
                assert step or norm.item() == pytest.approx(plain_norm(world_size), rel=1e-5)
                assert norm > CLIP
            engine.step()
            assert clip is None or torch.equal(engine.grad_norm, norm)
        ends.append(weights(engine))
        engine.destroy()
    assert_same(*ends)


@ranks(2)
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_clip_grad_norm_in_fp16_gives_the_norm_without_the_loss_scale(rank, world_size, preset):
    precision = {"compute": "fp16", "loss_scale": {"initial": 1024.0}}
    ends = []
    for limit in (CLIP, None):
        engine = begin(preset, precision=precision, gradients={"clip_norm": limit})
        engine.backward(loss_of(engine, rank))
        if limit is None:
            norm = engine.clip_grad_norm_(CLIP)
            assert norm.item() == pytest.approx(plain_norm(world_size), rel=1e-2)
        engine.step()
        assert not engine.was_skipped
        ends.append(weights(engine))
        engine.destroy()
    assert_same(*ends)


@ranks(2)
@pytest.mark.parametrize("preset", ["zero0", "zero1"])
def test_clip_grad_norm_reduces_what_was_left_to_the_step(rank, world_size, preset):
    ends = []
    for gradients in ({"clip_norm": CLIP}, {"reduce_at": "step"}):
        engine = begin(preset, gradients=gradients)
        engine.backward(loss_of(engine, rank))
        if "reduce_at" in gradients:
            assert engine.clip_grad_norm_(CLIP).item() == pytest.approx(plain_norm(world_size), rel=1e-5)
        engine.step()
        ends.append(weights(engine))
        engine.destroy()
    assert_same(*ends)


@ranks(2)
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_grad_hooks_run_once_in_a_step_that_clips(rank, world_size, preset):
    engine = begin(preset)
    calls = []
    engine.register_grad_hook(lambda unit, shard: calls.append(unit) or shard.mul_(2))
    engine.backward(loss_of(engine, rank))
    assert engine.clip_grad_norm_(CLIP).item() == pytest.approx(2 * plain_norm(world_size), rel=1e-5)
    engine.step()
    assert len(calls) == len(set(calls)) == len(engine.units)
    engine.destroy()


@ranks(1, 2)
@pytest.mark.parametrize("preset", STAGES)
def test_clip_grad_norm_out_of_place_is_refused(rank, world_size, preset):
    engine = begin(preset, batch={"accumulation": 2})
    engine.backward(loss_of(engine, rank))
    with pytest.raises(GradientError, match=r"only if engine\.is_boundary"):
        engine.clip_grad_norm_(1.0)
    engine.step()
    engine.backward(loss_of(engine, rank, 1))
    engine.clip_grad_norm_(1.0)
    with pytest.raises(GradientError, match="already clipped"):
        engine.backward(loss_of(engine, rank, 2))
    engine.step()
    assert engine.steps == 1
    with pytest.raises(ValueError, match="norm_type is inf"):
        engine.clip_grad_norm_(1.0, torch.inf)
    engine.destroy()
    engine = begin(preset)
    if world_size == 1:  # an error in a collective ends the other ranks
        with pytest.raises(GradientError, match="finds no gradients"):
            engine.clip_grad_norm_(1.0)
    engine.destroy()


def unscale(engine):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(engine.optimizer)


READS = {
    "clip_grad_norm_": lambda engine: nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0),
    "clip_grad_norm_ with foreach": lambda engine: nn.utils.clip_grad_norm_(engine.parameters(), 1.0, foreach=True),
    "clip_grad_value_": lambda engine: nn.utils.clip_grad_value_(engine.module.parameters(), 1.0),
    "of the optimizer": lambda engine: nn.utils.clip_grad_norm_(engine.optimizer.param_groups[0]["params"], 1.0),
    "norm": lambda engine: engine.module.last.weight.grad.norm(),
    "item": lambda engine: engine.module.last.bias.grad[0].item(),
    "tolist": lambda engine: engine.module.last.bias.grad.tolist(),
    "mul_": lambda engine: engine.module.last.weight.grad.mul_(0.5),
    "data": lambda engine: engine.module.last.weight.grad.data.zero_(),
    "+=": lambda engine: exec("p.grad += 1", {"p": engine.module.last.weight}),
    "unscale_": unscale,
}


@conduct(
    "reading or writing `p.grad` between backward and `step()`: `torch.nn.utils.clip_grad_norm_`, `clip_grad_value_`, "
    "Accelerate's `clip_grad_norm_`, `p.grad.norm()`, `GradScaler.unscale_`",
    "refused",
    "under every stage: `engine.clip_grad_norm_(max_norm)`, `engine.full_grad(name)`, `engine.register_grad_hook(fn)`",
)
@ranks(1, 2)
@pytest.mark.parametrize("preset", STAGES)
def test_held_gradients_refuse_to_be_read_and_written(rank, world_size, preset):
    for settings in ({}, {"batch": {"accumulation": 2}}, {"precision": {"compute": "bf16"}}):
        engine, reference = begin(preset, **settings), begin(preset, **settings)
        for one in (engine, reference):
            one.backward(loss_of(one, rank))
        for param in engine.module.parameters():
            assert param.grad.shape == param.shape
            assert param.grad.device == param.device
        for attempt in READS.values():
            with pytest.raises(GradientError, match=r"engine.clip_grad_norm_\(max_norm\).*engine.full_grad\(name\)"):
                attempt(engine)
        for one in (engine, reference):
            one.step()
            if settings.get("batch"):
                one.backward(loss_of(one, rank, 1))
                one.step()
            assert one.steps == 1
            assert all(param.grad is None for param in one.module.parameters())
        assert_same(weights(engine), weights(reference))
        engine.destroy()
        reference.destroy()


def test_a_module_is_compiled_while_gradients_are_held():
    """Dynamo copies the attributes of parameters, those of `p.grad` included."""
    engine = begin("zero1", batch={"accumulation": 2})
    engine.backward(loss_of(engine, 0))
    inner = engine.module.layers[0][0]
    assert torch.equal(torch.compile(inner, backend="eager", fullgraph=True)(data(0)), inner(data(0)))
    engine.destroy()


@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_accelerates_clipping_is_refused(preset):
    accelerate = pytest.importorskip("accelerate")
    engine = begin(preset)
    engine.backward(loss_of(engine, 0))
    with pytest.raises(GradientError, match="Accelerate's"):
        accelerate.Accelerator(cpu=True).clip_grad_norm_(engine.module.parameters(), 1.0)
    engine.destroy()


def optimized(engine):
    return [param for group in engine.optimizer.param_groups for param in group["params"]]


DROPS = {
    "engine": lambda engine: engine.zero_grad(),
    "optimizer": lambda engine: engine.optimizer.zero_grad(),
    "optimizer, to zeros": lambda engine: engine.optimizer.zero_grad(set_to_none=False),
    "model": lambda engine: engine.module.zero_grad(),
    "a module around it": lambda engine: nn.ModuleList([engine.module]).zero_grad(),
    "by hand": lambda engine: [setattr(param, "grad", None) for param in engine.module.parameters()],
    "by hand, in the optimizer": lambda engine: [setattr(param, "grad", None) for param in optimized(engine)],
}


@conduct(
    "`optimizer.zero_grad()`, `model.zero_grad()`, `p.grad = None` for all parameters",
    "works",
    "as `engine.zero_grad()`: drops the gradients accumulated so far, and nothing after a `step()` that updated",
)
@ranks(1, 2)
@pytest.mark.parametrize("preset", STAGES)
def test_a_batch_dropped_by_any_zero_grad_is_not_applied(rank, world_size, preset):
    reference = begin(preset)
    reference.backward(loss_of(reference, rank, 1))
    reference.step()
    for name, drop in DROPS.items():
        engine = begin(preset)
        engine.backward(loss_of(engine, rank, 0))
        drop(engine)
        if name not in ("by hand", "by hand, in the optimizer", "a module around it"):
            assert engine.is_at_rest
        engine.step()
        assert engine.steps == 0, name
        engine.backward(loss_of(engine, rank, 0))
        drop(engine)
        engine.backward(loss_of(engine, rank, 1))
        engine.step()
        assert engine.steps == 1
        assert_same(weights(reference), weights(engine))
        engine.destroy()
    reference.destroy()


@ranks(1, 2)
@pytest.mark.parametrize("preset", [*STAGES, "zero3_offload"])
def test_zero_grad_in_every_place_of_a_loop_that_steps_each_time(rank, world_size, preset):
    ends = []
    for places in ("", "abcd", "b", "d"):
        engine = begin(preset, optimizer=make_optimizer)
        for step in range(3):
            if "a" in places:
                engine.optimizer.zero_grad()
            loss = loss_of(engine, rank, step)
            if "b" in places:
                engine.optimizer.zero_grad()  # between forward and backward, as many loops do
            loss.backward()
            engine.step()
            if "c" in places:
                engine.module.zero_grad()
            if "d" in places:
                engine.zero_grad()
        assert engine.steps == 3
        ends.append(weights(engine))
        engine.destroy()
    assert_same(*ends)


@ranks(2)
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_a_forward_before_a_zero_grad_that_drops_something_can_still_be_used(rank, world_size, preset):
    engine, reference = begin(preset), begin(preset)
    engine.backward(loss_of(engine, rank, 0))
    loss = loss_of(engine, rank, 1)
    engine.optimizer.zero_grad()
    engine.backward(loss)
    reference.backward(loss_of(reference, rank, 1))
    for one in (engine, reference):
        one.step()
    assert_same(weights(engine), weights(reference))
    engine.destroy()
    reference.destroy()


@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_zero_grad_for_every_micro_batch_is_noticed(preset):
    """It drops what was accumulated, as in torch: the accumulation is never complete."""
    engine = begin(preset, batch={"accumulation": 2})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(6):
            engine.optimizer.zero_grad()
            engine.module.zero_grad()
            engine.backward(loss_of(engine, 0, step))
            engine.step()
    assert engine.steps == 0
    assert [str(each.message)[:50] for each in caught if each.category is HabitWarning] == [
        "zero_grad() dropped an unfinished accumulation twi"
    ]
    engine.destroy()


@conduct(
    "`zero_grad()` of a part of the model",
    "refused",
    "while there are gradients: `engine.zero_grad()` drops those of the whole model",
)
@pytest.mark.parametrize("preset", STAGES)
def test_zero_grad_of_a_part_of_the_model(preset):
    engine = begin(preset)
    engine.module.layers[0].zero_grad()
    engine.backward(loss_of(engine, 0))
    with pytest.raises(GradientError, match=r"zero_grad.. of Sequential, a part of the model"):
        engine.module.layers[0].zero_grad()
    engine.step()
    engine.module.layers[0].zero_grad()
    engine.destroy()
    assert "zero_grad" not in vars(engine.module.layers[0])


@conduct(
    "`optimizer.add_param_group()` after `initialize`",
    "refused",
    "make all groups before; a parameter that is to train later can be frozen after `initialize`",
)
@pytest.mark.parametrize("preset", ["zero1", "zero2_offload"])
def test_groups_cannot_be_added(preset):
    engine = begin(preset)
    with pytest.raises(ModelChangedError, match=r"make all groups before shardwise\.initialize"):
        engine.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    assert len(engine.optimizer.param_groups) == 1
    engine.destroy()


@conduct(
    "`optimizer.step()`, `GradScaler.step(optimizer)`",
    "refused",
    "call `engine.step()`; instead of GradScaler set `precision.compute: fp16`, or compute in bf16",
)
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
@pytest.mark.parametrize("make", [make_sgd, lambda model: torch.optim.Adagrad(model.parameters(), foreach=True)])
def test_the_users_optimizer_does_not_step(preset, make):
    engine, reference = begin(preset, optimizer=make), begin(preset, optimizer=make)
    for one in (engine, reference):
        one.backward(loss_of(one, 0))
    with pytest.raises(GradientError, match=r"call engine\.step\(\)"):
        engine.optimizer.step()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(GradientError):
        scaler.step(engine.optimizer)
    for one in (engine, reference):
        one.step()
        assert one.steps == 1
    assert_same(weights(engine), weights(reference))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(GradientError, match=r"precision\.compute: fp16"):
        scaler.step(engine.optimizer)  # after engine.step()
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    with pytest.raises(GradientError, match=r"call engine\.step\(\)"):
        disabled.step(engine.optimizer)
    for one in (engine, reference):
        one.backward(loss_of(one, 0, 1))
        one.step()
    assert_same(weights(engine), weights(reference))
    engine.destroy()
    reference.destroy()


@conduct(
    "`p.grad = x` between backward and `step()`",
    "refused",
    "by `step()` and by the next backward: edit in `engine.register_grad_hook(fn)`",
)
@ranks(1, 2)
@pytest.mark.parametrize("preset", STAGES)
def test_gradients_set_after_a_backward_are_noticed(rank, world_size, preset):
    for value in (torch.ones(WIDTH), None):
        for use in (lambda engine: engine.step(), lambda engine: engine.backward(loss_of(engine, rank))):
            engine = begin(preset)
            engine.backward(loss_of(engine, rank))
            engine.module.last.bias.grad = value
            with pytest.raises(GradientError, match=r"p.grad of 'last.bias' was .*register_grad_hook"):
                use(engine)
            assert engine.steps == 0
            engine.destroy()


@ranks(1, 2)
@pytest.mark.parametrize("preset", [*STAGES, "zero3_offload"])
def test_gradients_set_on_the_optimizers_parameters_are_noticed(rank, world_size, preset):
    """They are the engine's master pieces, so loops over `optimizer.param_groups` set them."""
    engine = begin(preset)
    engine.backward(loss_of(engine, rank))
    for param in optimized(engine):
        param.grad = torch.zeros_like(param)
    with pytest.raises(GradientError, match=r"\(master\)' was set by hand .*register_grad_hook"):
        engine.step()
    assert engine.steps == 0
    engine.destroy()


@conduct("`p.grad = x` before a backward, or without one", "works", "`step()` averages it over the ranks")
@ranks(1, 2)
@pytest.mark.parametrize("preset", [*STAGES, "zero3_offload"])
def test_gradients_set_without_a_backward_are_taken(rank, world_size, preset):
    """As pipeline schedules do that compute the gradients of weights with torch.autograd.grad."""
    engine, reference = begin(preset, optimizer=make_optimizer), begin(preset, optimizer=make_optimizer)
    for step in range(2):
        reference.backward(loss_of(reference, rank, step))
        reference.step()
        params = list(engine.module.parameters())
        for param, grad in zip(params, torch.autograd.grad(loss_of(engine, rank, step), params), strict=True):
            param.grad = grad
        engine.step()
    assert engine.steps == 2
    assert_same(weights(engine), weights(reference))
    for param in engine.module.parameters():
        param.grad = torch.ones_like(param)
    engine.zero_grad()
    engine.step()
    assert engine.steps == 2
    engine.destroy()
    reference.destroy()


@ranks(1, 2)
@pytest.mark.parametrize("preset", STAGES)
def test_gradients_set_before_a_backward_are_added_to(rank, world_size, preset):
    engine, reference = begin(preset), begin(preset)
    for param in engine.module.parameters():
        param.grad = torch.full_like(param, 0.5)
    engine.backward(loss_of(engine, rank))
    reference.backward(loss_of(reference, rank))
    for name, _ in engine.module.named_parameters():
        torch.testing.assert_close(engine.full_grad(name), reference.full_grad(name) + 0.5)
    engine.destroy()
    reference.destroy()


@ranks(1, 2)
@pytest.mark.parametrize("preset", ["zero0", "zero1", "zero2"])
def test_a_backward_of_a_penalty_alone(rank, world_size, preset):
    """It passes no module. Under zero3 the parameters are read inside `gathered`."""
    engine = begin(preset)
    before = weights(engine)
    sum(param.square().sum() for param in engine.module.parameters()).backward()
    engine.step()
    assert engine.steps == 1
    for name, value in weights(engine).items():
        torch.testing.assert_close(value, before[name] - 0.05 * 2 * before[name])
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("preset", ["zero0", "zero1", "zero2"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_penalty_reaches_parameters_before_any_module(rank, world_size, preset, create_graph):
    """In a plain backward of a later micro-batch, when `p.grad` is held."""
    grads = []
    for own in (True, False):
        engine = begin(preset, **SHARDED, batch={"accumulation": 2})
        for micro in range(2):
            loss = loss_of(engine, rank, micro) + sum(p.square().sum() for p in engine.module.parameters())
            if own:
                engine.backward(loss, scale=False)
            else:
                loss.backward(create_graph=create_graph)
            if micro == 0:
                engine.step()
        grads.append({name: engine.full_grad(name) for name, _ in engine.module.named_parameters()})
        engine.destroy()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-5, atol=1e-6)


@ranks(1, 2)
@pytest.mark.parametrize("preset", ["zero0", "zero1", "zero2"])
def test_a_penalty_after_the_last_backward_is_not_lost(rank, world_size, preset):
    """Where gradients are replicated, they are already reduced, which is an error; else it is added."""
    engine, reference = begin(preset), begin(preset)
    engine.backward(loss_of(engine, rank))
    penalty = sum(param.square().sum() for param in engine.module.parameters())
    penalty.backward()
    if preset in ("zero0", "zero1"):
        with pytest.raises(RuntimeError, match=r"already reduced in this step.*engine.no_sync"):
            engine.step()
    else:
        engine.step()
        penalty = sum(param.square().sum() for param in reference.module.parameters())
        reference.backward(loss_of(reference, rank) + penalty)
        reference.step()
        for name, value in weights(reference).items():
            torch.testing.assert_close(engine.full_param(name), value, rtol=1e-5, atol=1e-7)
    engine.destroy()
    reference.destroy()


@conduct(
    "pipelines: several forwards, then a backward for each",
    "works",
    "where gradients are replicated, run all but the last backward inside `engine.no_sync()`",
)
@ranks(2)
@pytest.mark.parametrize("preset", STAGES)
@pytest.mark.parametrize("order", ["210", "f0f1b0f2b1b2"])
def test_pipelined_micro_batches(rank, world_size, preset, order):
    order = order if "f" in order else "f0f1f2" + "".join(f"b{index}" for index in order)
    engine, reference = begin(preset), begin(preset)
    losses = {}
    for place, (what, index) in enumerate(zip(order[::2], order[1::2], strict=True)):
        if what == "f":
            losses[index] = loss_of(engine, rank, int(index))
        elif place < 5:
            with engine.no_sync():
                engine.backward(losses[index])
        else:
            engine.backward(losses[index])
    for index in range(3):
        if index < 2:
            with reference.no_sync():
                reference.backward(loss_of(reference, rank, index))
        else:
            reference.backward(loss_of(reference, rank, index))
    for one in (engine, reference):
        one.step()
        assert one.steps == 1
    for name, value in weights(reference).items():
        torch.testing.assert_close(engine.full_param(name), value, rtol=1e-5, atol=1e-7)
    engine.destroy()
    reference.destroy()


@ranks(2)
@pytest.mark.parametrize("preset", ["zero0", "zero1"])
def test_a_second_backward_after_replicated_gradients_were_reduced_is_refused(rank, world_size, preset):
    engine = begin(preset)
    loss = loss_of(engine, rank)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"already reduced in this step.*no_sync"):
        loss.backward()
    engine.destroy()
