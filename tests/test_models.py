"""Models and loops that engines stumble over: each works, or stops with an error that says what to do."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.observe import WireObserver
from support import ranks
from support.training import make_batch, make_model, make_sgd, start

STAGES = ["zero0", "zero1", "zero2", "zero3"]


@ranks(4)
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_one_axis_of_a_mesh(rank, world_size, preset):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "dp"))
    model = make_model("mlp")
    engine = shardwise.initialize(model, make_sgd(model), preset, mesh=mesh["dp"])
    engine.backward(engine(make_batch(model, rank, 0)))
    plain = make_model("mlp")
    for peer in dist.get_process_group_ranks(mesh["dp"].get_group()):
        (plain(make_batch(plain, peer, 0)) / 2).backward()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(engine.full_grad(name), param.grad, rtol=1e-4, atol=1e-7)
    engine.step()
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("preset", STAGES)
@pytest.mark.parametrize("order", ["local", "sharded"])
def test_accumulation_in_no_sync_counts_every_backward(rank, world_size, preset, order):
    engine = start("mlp", {"preset": preset, "gradients": {"order": order}}, make_sgd)
    plain = make_model("mlp")
    optimizer = make_sgd(plain)
    with engine.no_sync():
        for micro in range(2):
            engine.backward(engine(make_batch(plain, rank, micro)))
    engine.backward(engine(make_batch(plain, rank, 2)))
    engine.step()
    for peer in range(world_size):
        for micro in range(3):
            (plain(make_batch(plain, peer, micro)) / world_size).backward()
    optimizer.step()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(engine.full_param(name), param.detach(), rtol=1e-4, atol=1e-7)
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("preset", STAGES)
def test_a_penalty_made_before_the_forward_is_in_the_sum(rank, world_size, preset):
    engine, plain = start("mlp", {"preset": preset}, make_sgd), make_model("mlp")
    params = [param for param in engine.module.parameters() if param.ndim == 2]
    with shardwise.gathered(params):
        penalty = sum(param.square().sum() for param in params)
        engine.backward(engine(make_batch(engine.module, rank, 0)) + penalty)
    sum(param.square().sum() for param in plain.parameters() if param.ndim == 2).backward()
    for peer in range(world_size):
        (plain(make_batch(plain, peer, 0)) / world_size).backward()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(engine.full_grad(name), param.grad, rtol=1e-4, atol=1e-6)
    engine.step()
    assert engine.steps == 1
    engine.destroy()


@ranks(1, 2)
@pytest.mark.parametrize("preset", STAGES)
def test_a_backward_through_a_frozen_model_leaves_nothing_on_it(rank, world_size, preset):
    """As GANs do: the generator learns through a discriminator that is frozen meanwhile."""
    critic, plain = start("mlp", {"preset": preset}, make_sgd), make_model("mlp")
    optimizer = make_sgd(plain)
    x = make_batch(plain, rank, 0)
    for _ in range(2):
        for param in (*critic.module.parameters(), *plain.parameters()):
            param.requires_grad_(True)
        critic.backward(critic(x))
        critic.step()
        for peer in range(world_size):
            (plain(make_batch(plain, peer, 0)) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
        grads = []
        for model in (critic, plain):
            for param in model.parameters():
                param.requires_grad_(False)
            made = x.clone().requires_grad_()
            model(made * 2).backward()
            grads.append(made.grad)
        if world_size == 1:
            torch.testing.assert_close(*grads)
        assert critic.is_at_rest
    for name, param in plain.named_parameters():
        torch.testing.assert_close(critic.full_param(name), param.detach(), rtol=1e-4, atol=1e-7)
    critic.destroy()


class Reentrant(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x.square().mean()


@ranks(2)
@pytest.mark.parametrize("preset", STAGES)
def test_a_plain_backward_through_reentrant_checkpoints_ends_once(rank, world_size, preset):
    sent = []
    for plain in (False, True):
        model = Reentrant()
        engine = shardwise.initialize(model, make_sgd(model), preset)
        for _ in range(2):
            with WireObserver() as wire:
                loss = engine(torch.ones(2, 8, requires_grad=True))
                loss.backward() if plain else engine.backward(loss)
                engine.step()
        sent.append(wire.sent_bytes)
        engine.destroy()
    assert sent[0] == sent[1]


class ReentrantInside(nn.Module):
    """The checkpoint is inside of the modules that have parameters, where no hook sees it."""

    class Layer(nn.Linear):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=True)

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(self.Layer(8, 8) for _ in range(4)))

    def forward(self, x):
        return self.layers(x).square().mean()


@ranks(2)
@pytest.mark.parametrize("build", [Reentrant, ReentrantInside])
def test_one_backward_of_two_forwards_through_reentrant_checkpoints(rank, world_size, build):
    """Autograd does not say that the first forward has a part in the backward: its gradients arrive in other tasks."""
    for preset in ("zero2", "zero3"):
        torch.manual_seed(0)
        model, batches = build(), torch.randn(2, 2, 8, requires_grad=True)
        (model(batches[0]) + model(batches[1])).backward()
        plain = {name: param.grad for name, param in model.named_parameters()}
        engine = shardwise.initialize(model, make_sgd(model), preset)
        engine.backward(engine(batches[0]) + engine(batches[1]))
        for name, grad in plain.items():
            torch.testing.assert_close(engine.full_grad(name), grad)
        engine.destroy()


class EvaluatesInAnotherOrder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for index in (0, 1, 2, 3) if self.training else (1, 0, 2, 3):
            x = torch.tanh(self.layers[index](x))
        return x.square().mean()


@ranks(2)
@pytest.mark.parametrize("preset", ["zero0", "zero1", "zero2"])
def test_one_rank_evaluating_between_forward_and_backward_changes_no_order(rank, world_size, preset):
    grads = []
    for alone in (False, True):
        torch.manual_seed(0)
        model = EvaluatesInAnotherOrder()
        engine = shardwise.initialize(model, make_sgd(model), preset)
        x = torch.linspace(-1, 1, 16).view(2, 8) * (rank + 1)
        loss = engine(x)
        if alone and rank == 1:
            with torch.no_grad():
                model.eval()(x)
                model.train()
        engine.backward(loss)
        grads.append(engine.full_grad("layers.0.weight"))
        engine.destroy()
    assert torch.equal(grads[0], grads[1])


@pytest.mark.parametrize("optimizer", ["Adagrad", "AdamW"])
def test_scalar_parameters_with_state_made_before(optimizer):
    model = make_model("odd")
    params = [param for param in model.parameters() if param.requires_grad]
    built = getattr(torch.optim, optimizer)(params, lr=0.01)
    model(make_batch(model, 0, 0)).backward()
    built.step()
    built.zero_grad()
    engine = shardwise.initialize(model, built, "zero3")
    engine.backward(engine(make_batch(model, 0, 1)))
    engine.step()
    assert engine.full_state("scale")["step"].item() == 2
    engine.destroy()


@pytest.mark.parametrize("preset", STAGES)
def test_assigning_a_state_dict_is_refused(preset):
    engine = start("mlp", {"preset": preset})
    for target in (engine, engine.module):
        with pytest.raises(ValueError, match="leave assign out"):
            target.load_state_dict(make_model("mlp").state_dict(), assign=True)
    engine.destroy()
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("preset", STAGES)
def test_gradient_hooks_run_once_a_step(rank, world_size, preset):
    engine = start("mlp", {"preset": preset, "batch": {"accumulation": 2}})
    calls = []
    engine.register_grad_hook(lambda unit, shard: calls.append(unit))
    for micro in range(2):
        engine.backward(engine(make_batch(engine.module, rank, micro)))
        engine.step()
    assert sorted(calls) == sorted(unit.name for unit in engine.units)
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("how", ["wrapped", "in place", "whole"])
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_compiled_models(rank, world_size, how, preset):
    """With a backend that traces and differentiates as all do, and needs no compiler."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    engine = shardwise.initialize(*with_sgd(compiled(make_model("gpt"), how)), {"preset": preset})
    plain = start("gpt", {"preset": preset}, make_sgd)
    for step in range(2):
        batch = make_batch(plain.module, rank, step)
        for one in (engine, plain):
            one.backward(one(batch))
            one.step()
    for name, _ in plain.module.named_parameters():
        seen = engine.full_param({param: full for full, param in names(engine.module).items()}[name])
        torch.testing.assert_close(seen, plain.full_param(name), rtol=1e-5, atol=1e-7)
    # Blocks compiled one by one are alike: one graph serves them all, whole, without a break for the engine's hooks.
    assert counters["frames"]["ok"] >= 1
    assert how == "whole" or (counters["frames"]["ok"] == 1 and not counters["graph_break"])
    engine.destroy()
    plain.destroy()


def compiled(model, how):
    if how == "whole":
        return torch.compile(model, backend="aot_eager")
    for index, block in enumerate(model.blocks):
        if how == "wrapped":
            model.blocks[index] = torch.compile(block, backend="aot_eager")
        else:
            block.compile(backend="aot_eager")
    return model


def with_sgd(model):
    return model, make_sgd(model)


def names(model):
    """Names in the compiled model, and what they are in the plain one."""
    return {name: name.replace("_orig_mod.", "") for name, _ in model.named_parameters()}
