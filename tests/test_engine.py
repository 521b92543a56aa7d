"""What users meet: the loop, what the model shows at each moment, and what happens when something goes wrong."""

import copy
import gc
import io
import pickle
import time
import weakref
from functools import partial
from typing import ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.errors import NotGatheredError
from shardwise.observe import StorageObserver
from shardwise.optim.states import PARAM
from shardwise.unit.held_grads import HeldGrad
from support import ranks, run_ranks
from support.training import digest, make_batch, make_model, make_sgd, start, train, train_step, whole_values

STAGES = ["zero0", "zero1", "zero2", "zero3"]
REPLICATED = STAGES[:3]


def weights_after(engine):
    return {name: engine.full_param(name) for name, _ in engine.module.named_parameters()}


# Starting


def one_process(rank, world_size):
    assert not dist.is_initialized()
    assert len(set(train("mlp", {"preset": "zero3"}, 0))) == 3


def test_one_process_needs_no_torchrun():
    run_ranks(one_process, 1, fresh=True, init=False)


def from_torchrun(rank, world_size):
    engine = start("mlp", {"preset": "zero2"})
    assert dist.get_world_size() == world_size
    train_step(engine, rank, 0)


def test_the_process_group_starts_from_torchruns_environment():
    run_ranks(from_torchrun, 2, fresh=True, init=False, torchrun=True)


@ranks(2)
def test_all_ranks_start_from_rank_0(rank, world_size):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].running_mean.fill_(rank)
    expected = [model[0].weight.detach().clone()]
    dist.broadcast_object_list(expected, src=0)
    engine = shardwise.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero3")
    assert torch.equal(engine.full_param("0.weight"), expected[0])
    assert model[1].running_mean.eq(0).all()
    engine.destroy()


@ranks(2)
def test_a_mesh_names_the_group(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = make_model("mlp")
    engine = shardwise.initialize(model, make_sgd(model), "zero1", mesh=mesh)
    train_step(engine, rank, 0)
    engine.destroy()


def test_an_optimizer_of_another_model_is_refused():
    optimizer = torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)
    with pytest.raises(shardwise.ConfigError, match="build it on the parameters of the very model"):
        shardwise.initialize(nn.Linear(3, 3), optimizer, "zero1")


def test_a_trainable_parameter_outside_the_optimizer_is_refused():
    model = nn.Linear(3, 3)
    with pytest.raises(shardwise.ConfigError, match="'bias'"):
        shardwise.initialize(model, torch.optim.SGD([model.weight], lr=0.1), "zero1")


@ranks(2)
@pytest.mark.parametrize("preset", STAGES)
def test_an_optimizer_may_have_taken_steps_before(rank, world_size, preset):
    model, plain = make_model("mlp"), make_model("mlp")
    optimizers = [make_sgd(model), make_sgd(plain)]
    for one, optimizer in zip((model, plain), optimizers, strict=True):
        one(make_batch(one, 0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = shardwise.initialize(model, optimizers[0], preset)
    for step in (1, 2):
        train_step(engine, 0, step)
        plain(make_batch(plain, 0, step)).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(engine.full_param(name), param.detach(), rtol=1e-5, atol=1e-7)
    engine.destroy()


def test_a_model_under_an_engine_is_refused():
    engine = start("mlp", {"preset": "zero2"})
    with pytest.raises(shardwise.ConfigError, match="destroy"):
        shardwise.initialize(engine.module, make_sgd(engine.module), "zero2")
    engine.destroy()


def test_optimizer_and_scheduler_from_the_configuration():
    config = {
        "preset": "zero2",
        "optimizer": {"name": "AdamW", "params": {"lr": 0.5}},
        "scheduler": {"name": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.5}},
    }
    engine = shardwise.initialize(make_model("mlp"), None, config)
    rates = []
    for step in range(3):
        train_step(engine, 0, step)
        rates.append(engine.optimizer.param_groups[0]["lr"])
    assert rates == sorted(set(rates))
    engine.destroy()


# The loop


@ranks(2)
@pytest.mark.parametrize("preset", STAGES)
def test_plain_backward_is_the_same(rank, world_size, preset):
    expected = train("gpt", {"preset": preset}, rank)
    engine = start("gpt", {"preset": preset})
    for step in range(3):
        engine(make_batch(engine.module, rank, step)).backward()
        engine.step()
        assert digest(engine) == expected[step]
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("preset", STAGES)
def test_a_scheduler_stepped_after_step_does_not_leak_into_it(rank, world_size, preset):
    finals = []
    for scheduled in (False, True):
        engine = start("mlp", {"preset": preset})
        train_step(engine, rank, 0)
        if scheduled:
            for group in engine.optimizer.param_groups:
                group["lr"] = 1e3
        finals.append(digest(engine))
        engine.destroy()
    assert finals[0] == finals[1]


@ranks(2)
def test_schedulers_act_on_the_optimizer(rank, world_size):
    model = make_model("mlp")
    optimizer = make_sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    engine = shardwise.initialize(model, optimizer, "zero3", lr_scheduler=scheduler)
    train_step(engine, rank, 0)
    before = weights_after(engine)
    engine.optimizer.param_groups[0]["momentum"] = 0.0
    train_step(engine, rank, 1)
    for name, value in weights_after(engine).items():
        assert torch.equal(value, before[name])
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("preset", STAGES)
@pytest.mark.parametrize("boundary", ["config", "caller"])
def test_nothing_changes_before_the_boundary(rank, world_size, preset, boundary):
    engine = start("mlp", {"preset": preset, "batch": {"accumulation": 3 if boundary == "config" else 1}})
    before = digest_weights(engine)
    for micro in range(3):
        if boundary == "caller":
            engine.set_boundary(micro == 2)
        assert engine.is_boundary == (micro == 2)
        engine.backward(engine(make_batch(engine.module, rank, micro)))
        engine.step()
        assert (digest_weights(engine) == before) == (micro < 2)
    engine.destroy()


@ranks(1, 3)
@pytest.mark.parametrize("preset", ["zero0", "zero3"])
def test_looks_inside_agree_with_what_is_held(rank, world_size, preset):
    """What the tests of bits hash, by the public way, one parameter at a time."""
    engine = start("odd", {"preset": preset})
    train_step(engine, rank, 0)
    for name, found in whole_values(engine).items():
        assert torch.equal(found.pop(PARAM), engine.full_param(name))
        param = engine.module.get_parameter(name)
        state = engine.full_state(name) if param.requires_grad else {}
        found = {key.removeprefix("optim/"): value for key, value in found.items() if param.numel()}
        assert sorted(found) == sorted(state)
        assert all(torch.equal(found[key], state[key]) for key in state), name
    engine.destroy()


def digest_weights(engine):
    return [value.sum().item() for value in weights_after(engine).values()]


@ranks(2)
def test_step_without_backward_does_nothing(rank, world_size):
    engine = start("mlp", {"preset": "zero2"})
    before = digest_weights(engine)
    engine.step()
    assert digest_weights(engine) == before
    assert engine.steps == 0
    engine.destroy()


def test_closures_and_the_optimizers_own_step_are_refused():
    engine = start("mlp", {"preset": "zero1"})
    with pytest.raises(TypeError, match="closure"):
        engine.step(lambda: None)
    with pytest.raises(RuntimeError, match=r"engine\.step\(\)"):
        engine.optimizer.step()
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize(
    "optimizer", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Rprop"]
)
def test_any_element_wise_optimizer(rank, world_size, optimizer):
    hashes = []
    for preset in ("zero0", "zero3"):
        model = make_model("mlp")
        engine = shardwise.initialize(model, getattr(torch.optim, optimizer)(model.parameters(), lr=0.01), preset)
        for step in range(2):
            train_step(engine, rank, step)
        hashes.append(digest(engine))
        engine.destroy()
    assert hashes[0] == hashes[1]


@ranks(2)
@pytest.mark.parametrize(
    "precision",
    [
        {"compute": "bf16", "autocast": True},
        {"compute": "bf16", "reduce_dtype": "fp32"},
        {"compute": "bf16", "accumulate_dtype": "bf16"},
        {"compute": "fp32", "reduce_dtype": "bf16"},
    ],
    ids=str,
)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_precisions_agree_across_stages(rank, world_size, precision, accumulation):
    for order, presets in (("local", ["zero0", "zero1"]), ("sharded", ["zero1", "zero2", "zero3"])):
        config = {"precision": precision, "batch": {"accumulation": accumulation}, "gradients": {"order": order}}
        hashes = [train("gpt", {"preset": preset, **config}, rank, steps=2) for preset in presets]
        assert all(other == hashes[0] for other in hashes)


@ranks(2)
@pytest.mark.parametrize("model", ["tied"])
def test_tied_weights(rank, world_size, model):
    hashes = [train(model, {"preset": preset}, rank) for preset in STAGES]
    assert all(other == hashes[0] for other in hashes)


@ranks(2)
@pytest.mark.parametrize("preset", STAGES)
def test_activation_checkpointing_by_configuration_changes_no_bit(rank, world_size, preset):
    expected = train("gpt", {"preset": preset}, rank)
    assert train("gpt", {"preset": preset, "checkpointing": {"enabled": True}}, rank) == expected


# What the model shows


@ranks(2, 3)
@pytest.mark.parametrize("preset", STAGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_way_to_look_sees_the_updated_values(rank, world_size, preset, precision):
    engine = start("gpt", {"preset": preset, "precision": {"compute": precision}})
    name, held = "blocks.1.up.weight", engine.module.blocks[1].up.weight
    looks = {
        "state_dict": lambda: engine.module.state_dict()[name].clone(),
        "engine": lambda: engine.state_dict()[name].clone(),
        "gathered": lambda: read_gathered(held),
    }
    if preset != "zero3":
        looks["parameter"] = lambda: engine.module.blocks[1].up.weight.detach().clone()
        looks["held reference"] = lambda: held + 0
        looks["data"] = lambda: held.data.clone()
    for step, (way, look) in enumerate(looks.items()):
        train_step(engine, rank, step)
        seen = look()
        assert torch.equal(seen, engine.full_param(name).to(seen.dtype)), way
    engine.destroy()


def read_gathered(param):
    with shardwise.gathered([param]):
        return param.detach().clone()


@ranks(2)
@pytest.mark.parametrize("preset", STAGES)
def test_a_direct_call_sees_the_updated_values(rank, world_size, preset):
    engine = start("gpt", {"preset": preset})
    batch = make_batch(engine.module, 0, 99)
    train_step(engine, rank, 0)
    with torch.no_grad():
        seen = engine.module(batch)
    plain = make_model("gpt")
    plain.load_state_dict(engine.state_dict())
    assert torch.equal(seen, plain(batch).detach())
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("preset", REPLICATED)
def test_one_rank_alone_may_evaluate_replicated_weights(rank, world_size, preset):
    expected = train("gpt", {"preset": preset}, rank)
    engine = start("gpt", {"preset": preset})
    for step in range(3):
        train_step(engine, rank, step)
        if rank == 1:
            with torch.no_grad():
                engine(make_batch(engine.module, 0, 99))
    assert digest(engine) == expected[-1]
    engine.destroy()


@ranks(2)
def test_released_parameters_refuse_reads_and_writes(rank, world_size):
    engine = start("mlp", {"preset": "zero3"})
    train_step(engine, rank, 0)
    weight = engine.module.layers[2].weight
    reads = {
        "isnan": lambda: weight.isnan(),
        "sum": lambda: torch.sum(weight),
        "item": lambda: weight[0, 0].item(),
        "tolist": lambda: weight.data.tolist(),
        "numpy": lambda: weight.detach().numpy(),
        "clone": lambda: weight.view(-1).clone(),
        "to": lambda: weight.to(torch.bfloat16),
        "contiguous": lambda: weight.contiguous(),
        "__getitem__": lambda: weight[[0, 1]],
        "copy_": lambda: torch.zeros(40, 40).copy_(weight),
        "_foreach_norm": lambda: torch._foreach_norm([weight]),
        "linear": lambda: nn.functional.linear(torch.ones(40), weight),
        "copy.deepcopy": lambda: copy.deepcopy(weight.data),
        "pickle": lambda: pickle.dumps(weight.detach()),
    }
    for name, read in reads.items():
        words = rf"'layers\.2\.weight', a parameter of .*, so {name} .*shardwise\.gathered\(params\)"
        with pytest.raises(NotGatheredError, match=words), torch.no_grad():
            read()
    with torch.no_grad():
        writes = (lambda: weight.fill_(1.0), lambda: weight.copy_(torch.ones(40, 40)), lambda: nn.init.zeros_(weight))
        for write in (*writes, lambda: weight.data.add_(1.0), lambda: weight.t().zero_()):
            with pytest.raises(NotGatheredError, match="gathered"):
                write()
        with pytest.raises(NotGatheredError, match="gathered"):
            weight[0] = 1.0
        with pytest.raises(NotGatheredError, match="would write nowhere"):
            torch.add(torch.ones(40, 40), 1.0, out=weight.data)
    whole = engine.full_param("layers.2.weight")
    assert torch.equal(copy.deepcopy(weight), whole)
    saved = io.BytesIO()
    torch.save({"weight": weight}, saved)
    saved.seek(0)
    assert torch.equal(torch.load(saved)["weight"], whole)
    with pytest.raises(NotGatheredError):
        weight.isnan()
    engine.destroy()


@ranks(2)
def test_released_parameters_have_metadata(rank, world_size):
    engine = start("mlp", {"preset": "zero3"})
    weight, plain = engine.module.layers[2].weight, torch.nn.Parameter(torch.zeros(40, 40))
    for tensor in (weight, weight.data, weight.detach(), weight.T, weight[:40]):
        assert tensor.shape == tensor.size() == (40, 40)
        assert (tensor.numel(), torch.numel(tensor), len(tensor), tensor.dim()) == (1600, 1600, 40, 2)
        assert (tensor.dtype, tensor.device, tensor.is_cuda) == (plain.dtype, plain.device, False)
        assert (torch.is_floating_point(tensor), tensor.is_meta, isinstance(tensor, torch.Tensor)) == (
            True,
            False,
            True,
        )
        assert torch.zeros_like(tensor).eq(0).all()
        assert torch.full_like(tensor, 2.0).eq(2).all()
        assert type(torch.ones(40, 40, dtype=torch.bfloat16).to(tensor)) is torch.Tensor
        assert torch.ones(1, 40).expand_as(tensor).sum() == 1600
        assert {tensor: 1}[tensor] == 1
        assert "'layers.2.weight' (40, 40)" in repr(tensor)
        assert "not gathered" in f"{tensor}"
    assert (isinstance(weight, torch.nn.Parameter), weight.requires_grad, weight.is_leaf) == (True, True, True)
    assert weight.expand_as(weight).grad_fn.next_functions[0][0].variable is weight
    early = weight.data
    with shardwise.gathered(weight):
        assert "Parameter containing" in repr(weight)
        with pytest.raises(NotGatheredError):  # its storage is not that of the values
            early.sum()
    engine.destroy()


@ranks(1, 2)
@pytest.mark.parametrize("preset", STAGES)
def test_parameters_of_a_destroyed_engine_refuse_reads(rank, world_size, preset):
    engine = start("mlp", {"preset": preset})
    train_step(engine, rank, 0)
    state, model = engine.state_dict(), engine.module
    engine.destroy()
    weight = model.layers[2].weight
    for read in (weight.sum, lambda: make_sgd(model).step() or weight.data.tolist()):
        with pytest.raises(NotGatheredError, match=r"'layers\.2\.weight'.* its engine was destroyed"):
            read()
    for name, param in model.named_parameters():
        param.data = state[name]
    assert type(weight) is torch.nn.Parameter
    again = shardwise.initialize(model, make_sgd(model), preset)
    assert torch.equal(again.full_param("layers.2.weight"), state["layers.2.weight"])
    again.destroy()


class Renormed(nn.Module):
    """Writes its weights while it runs: rows of an embedding are kept within a norm, the same rows on all ranks."""

    class Embedding(nn.Embedding):
        def forward(self, x):
            return nn.functional.embedding(x, self.weight, max_norm=0.5)

    def __init__(self):
        super().__init__()
        self.embedding = self.Embedding(16, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.embedding(x)).square().mean()


@ranks(2)
def test_what_a_forward_writes_into_weights_is_kept(rank, world_size):
    seen = {}
    for preset in STAGES:
        torch.manual_seed(0)
        model = Renormed()
        with torch.no_grad():
            model.embedding.weight.mul_(20)
        engine = shardwise.initialize(model, make_sgd(model), {"preset": preset, "runtime": {"min_unit_bytes": 1}})
        for _ in range(3):
            engine.backward(engine(torch.arange(16)))
            engine.step()
        with torch.no_grad():
            engine(torch.arange(16))
        seen[preset] = engine.full_param("embedding.weight")
        assert seen[preset].norm(dim=1).max() <= 0.5 + 1e-4, preset
    assert all(torch.equal(seen[preset], seen["zero0"]) for preset in STAGES)


class Aside(torch.nn.Module):
    """Appends a loss of its own to a list, after the output that it returns."""

    losses: ClassVar[list[torch.Tensor]] = []

    def __init__(self):
        super().__init__()
        self.inner, self.aside = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        output = torch.tanh(self.inner(x))
        self.losses.append(self.aside(output).square().mean())
        return output


@ranks(2)
def test_a_backward_from_inside_a_module_finds_weights_that_have_moved(rank, world_size):
    seen = []
    for views in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(Aside() for _ in range(4)))
        engine = shardwise.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero3")
        with shardwise.gathered(list(model.parameters())):
            arrays = [param.detach().numpy() for param in model.parameters()] if views else []
        Aside.losses.clear()
        engine(torch.full((2, 8), 0.1 * (rank + 1)))
        engine.backward(sum(Aside.losses))
        engine.step()
        seen.append(digest(engine))
        assert len(arrays) == 16 * views
        engine.destroy()
    assert seen[0] == seen[1]


def test_a_destroyed_engine_says_so(tmp_path):
    engine = shardwise.initialize(torch.nn.Linear(2, 2), lambda params: torch.optim.SGD(params, lr=0.1), "zero3")
    loss = engine(torch.ones(1, 2)).sum()
    engine.destroy()
    calls = {
        "forward": torch.ones(1, 2),
        "backward": loss,
        "full_param": "weight",
        "full_grad": "weight",
        "full_state": "weight",
        "load_state_dict": {},
        "save": tmp_path,
        "load": tmp_path,
        "export": tmp_path,
    }
    for name, argument in calls.items():
        with pytest.raises(RuntimeError, match=rf"engine\.{name}\(\) after engine\.destroy\(\)"):
            getattr(engine, name)(argument)
    for name in ("step", "state_dict"):
        with pytest.raises(RuntimeError, match=rf"engine\.{name}\(\) after engine\.destroy\(\)"):
            getattr(engine, name)()
    engine.destroy()


@ranks(2)
def test_views_of_the_user_outlive_what_they_are_views_of(rank, world_size):
    engine = start("mlp", {"preset": "zero3"})
    weight = engine.module.layers[2].weight
    with shardwise.gathered(weight):
        array = weight.detach().numpy()
        expected = array.copy()
    train_step(engine, rank, 0)
    assert (array == expected).all()
    assert train("mlp", {"preset": "zero3"}, rank, steps=1) == [digest(engine)]
    engine.destroy()

    engine = start("mlp", {"preset": "zero1"})
    view = engine.state_dict()["layers.2.weight"]
    expected = view.clone()
    engine.destroy()
    assert torch.equal(view, expected)


@ranks(2)
@pytest.mark.parametrize("preset", STAGES)
def test_weights_changed_between_forward_and_backward_are_an_error(rank, world_size, preset):
    engine = start("gpt", {"preset": preset})
    train_step(engine, rank, 0)
    early = engine(make_batch(engine.module, rank, 1))
    train_step(engine, rank, 2)
    with pytest.raises(RuntimeError, match="changed between this forward and its backward"):
        engine.backward(early)

    loss = engine(make_batch(engine.module, rank, 3))
    params = list(engine.module.blocks[1].parameters())
    with shardwise.gathered(params, write=True), torch.no_grad():
        engine.module.blocks[1].up.weight.mul_(0.5)
    with pytest.raises(RuntimeError, match=r"changed between|modified by an inplace operation"):
        engine.backward(loss)
    engine.destroy()


@ranks(2, 3)
@pytest.mark.parametrize("preset", ["zero0", "zero1"])
def test_local_gradients_can_be_read_and_edited_before_step(rank, world_size, preset):
    engine = start("mlp", {"preset": preset, "gradients": {"reduce_at": "step"}})
    plain = make_model("mlp")
    plain(make_batch(plain, rank, 0)).backward()
    engine.backward(engine(make_batch(engine.module, rank, 0)))
    for param, expected in zip(engine.module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.grad, expected.grad)
    engine.module.layers[0].weight.grad.zero_()
    engine.module.layers[2].weight.grad = torch.zeros(40, 40)
    before = weights_after(engine)
    engine.optimizer.param_groups[0]["weight_decay"] = 0.0
    engine.step()
    after = weights_after(engine)
    unchanged = [name for name in after if torch.equal(after[name], before[name])]
    assert unchanged == ["layers.0.weight", "layers.2.weight"]
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("preset", STAGES)
def test_p_grad_is_as_the_documentation_says(rank, world_size, preset):
    engine = start("mlp", {"preset": preset, "batch": {"accumulation": 2}})
    engine.backward(engine(make_batch(engine.module, rank, 0)))
    engine.step()
    assert all(isinstance(param.grad, HeldGrad) for param in engine.module.parameters())
    engine.backward(engine(make_batch(engine.module, rank, 1)))
    assert all(isinstance(param.grad, HeldGrad) for param in engine.module.parameters())
    engine.step()
    assert all(param.grad is None for param in engine.module.parameters())
    engine.destroy()


@pytest.mark.parametrize("preset", ["zero2", "zero3"])
def test_sharded_gradients_cannot_wait_for_step(preset):
    with pytest.raises(shardwise.ConfigError, match="reduce_at"):
        start("mlp", {"preset": preset, "gradients": {"reduce_at": "step"}})


@ranks(2, 4)
@pytest.mark.parametrize("preset", STAGES)
def test_full_state_where_groups_keep_different_state(rank, world_size, preset):
    """SGD keeps momentum for one group only: some ranks own none of it, and must still take part."""
    model = make_model("mlp")
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "momentum": 0.9},
        {"params": [p for p in model.parameters() if p.ndim == 1], "momentum": 0.0},
    ]
    engine = shardwise.initialize(model, torch.optim.SGD(groups, lr=0.1), preset)
    train_step(engine, rank, 0)
    assert engine.full_state("layers.0.weight")["momentum_buffer"].shape == (40, 40)
    assert engine.full_state("layers.0.bias") == {}
    engine.destroy()


@ranks(2)
def test_state_that_is_one_number_stays_one(rank, world_size):
    model = make_model("mlp")
    engine = shardwise.initialize(model, torch.optim.NAdam(model.parameters()), "zero3")
    train_step(engine, rank, 0)
    state = engine.full_state("layers.2.weight")
    assert {key: tuple(value.shape) for key, value in state.items()} == {
        "exp_avg": (40, 40),
        "exp_avg_sq": (40, 40),
        "mu_product": (),
        "step": (),
    }
    engine.destroy()


@ranks(2, 3)
@pytest.mark.parametrize("preset", STAGES)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_full_grad_is_the_mean_of_the_local_gradients(rank, world_size, preset, accumulation):
    engine = start("gpt", {"preset": preset, "batch": {"accumulation": accumulation}})
    for micro in range(accumulation):
        engine.backward(engine(make_batch(engine.module, rank, micro)))
        if micro < accumulation - 1:
            engine.step()
    plain = make_model("gpt")
    for other in range(world_size):
        for micro in range(accumulation):
            (plain(make_batch(plain, other, micro)) / accumulation / world_size).backward()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(engine.full_grad(name), param.grad, rtol=1e-4, atol=1e-6)
    total = torch.stack([param.grad.norm() for param in plain.parameters()]).norm()
    engine.step()
    assert engine.grad_norm.item() == pytest.approx(total.item(), rel=1e-4)
    with pytest.raises(RuntimeError, match="not reduced yet"):
        engine.full_grad("head.weight")
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("preset", STAGES)
def test_hooks_on_reduced_shards_may_edit_them(rank, world_size, preset):
    engine = start("mlp", {"preset": preset}, make_sgd)
    engine.register_grad_hook(lambda unit, shard: shard.zero_())
    before = digest_weights(engine)
    train_step(engine, rank, 0)
    assert digest_weights(engine) == before
    assert engine.grad_norm.item() == 0.0
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("preset", STAGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gathered_takes_anything_and_keeps_what_is_written(rank, world_size, preset, precision):
    engine = start("mlp", {"preset": preset, "precision": {"compute": precision}})
    train_step(engine, rank, 0)
    model, before = engine.module, weights_after(engine)
    first, second = model.layers[0].weight, model.layers[2].weight
    buffer = torch.ones(3)
    forms = [first, [first], (param for param in (first,)), [first, None, buffer, first], {first, second}, None, []]
    for form in forms:
        with shardwise.gathered(form):
            assert not isinstance(form, torch.Tensor) or not first.isnan().any()
    with shardwise.gathered([second, first], write=True, source=1), torch.no_grad(), shardwise.gathered(first):
        first[0].fill_(float(rank))
    after = weights_after(engine)
    assert after["layers.0.weight"][0].eq(1.0).all()
    # Elements nobody wrote keep every bit of their master copy, also where the weights are 16-bit.
    assert torch.equal(after["layers.0.weight"][1:], before["layers.0.weight"][1:])
    assert torch.equal(after["layers.2.weight"], before["layers.2.weight"])
    train_step(engine, rank, 1)
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("preset", STAGES)
def test_an_update_that_breaks_off_leaves_nothing_behind(rank, world_size, preset):
    engine = start("mlp", {"preset": preset, "precision": {"compute": "bf16"}})
    train_step(engine, rank, 0)
    engine.backward(engine(make_batch(engine.module, rank, 1)))
    with mock.patch("shardwise.optim.updater.scaled", side_effect=MemoryError), pytest.raises(MemoryError):
        engine.step()
    assert "work" not in engine.report().memory_bytes
    assert all(piece.param.grad is None for unit in engine.units for piece in unit.weights.pieces)
    engine.destroy()


@ranks(1, 2)
def test_gathered_refuses_what_is_no_parameter_and_no_rank(rank, world_size):
    engine = start("mlp", {"preset": "zero3"})
    model = engine.module
    for given in (model, model.layers, model.named_parameters(), dict(model.named_parameters()), "layers.0.weight"):
        with pytest.raises(TypeError, match=r"pass model\.parameters\(\)"), shardwise.gathered(given):
            pass
    for source in (-1, world_size, "0"):
        with (
            pytest.raises(ValueError, match=f"one of the {world_size} ranks"),
            shardwise.gathered(model.parameters(), write=True, source=source),
        ):
            pass
    train_step(engine, rank, 0)
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("preset", STAGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("has_graph", [True, False])
def test_what_is_written_is_kept_through_a_forward(rank, world_size, preset, precision, has_graph):
    """Also by one rank, and if the units before were left gathered by a forward without backward."""
    engine = start("mlp", {"preset": preset, "precision": {"compute": precision}})
    train_step(engine, rank, 0)
    with torch.no_grad():
        engine(make_batch(engine.module, rank, 0))
    engine(make_batch(engine.module, rank, 1))
    params = list(engine.module.parameters())
    with shardwise.gathered(params, write=True, source=1), torch.no_grad():
        for param in params:
            param.fill_(float(rank))
        with torch.set_grad_enabled(has_graph):
            engine(make_batch(engine.module, rank, 2))
        assert all(param.eq(rank).all() for param in params)
    assert all(value.eq(1.0).all() for value in weights_after(engine).values())
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("preset", STAGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_load_state_dict_reaches_the_master_copies(rank, world_size, preset, precision):
    source = make_model("mlp")
    with torch.no_grad():
        for param in source.parameters():
            param.copy_(torch.randn_like(param).bfloat16())
    for target in ("engine", "model"):
        engine = start("mlp", {"preset": preset, "precision": {"compute": precision}})
        train_step(engine, rank, 0)
        (engine if target == "engine" else engine.module).load_state_dict(source.state_dict())
        for name, param in source.named_parameters():
            assert torch.equal(engine.full_param(name), param.detach())
        engine.destroy()


# When something goes wrong


class Trap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("boom in backward")


@ranks(2)
@pytest.mark.parametrize("preset", STAGES)
@pytest.mark.parametrize("where", ["forward", "backward", "plain backward"])
def test_an_exception_leaves_the_engine_usable(rank, world_size, preset, where):
    expected = train("gpt", {"preset": preset}, rank)
    engine = start("gpt", {"preset": preset})
    for step in range(3):
        fail_once(engine, where, make_batch(engine.module, rank, 50 + step))
        train_step(engine, rank, step)
        assert digest(engine) == expected[step]
    engine.destroy()


def fail_once(engine, where, batch):
    def boom(module, args, output):
        if where == "forward":
            raise ValueError("boom in forward")
        return Trap.apply(output)

    handle = engine.module.blocks[1].up.register_forward_hook(boom)
    if where == "forward":
        with pytest.raises(ValueError, match="boom"):
            engine(batch)
    else:
        loss = engine(batch)
        backward = loss.backward if where == "plain backward" else partial(engine.backward, loss)
        with pytest.raises(ValueError, match="boom"):
            backward()
    handle.remove()


@ranks(2)
@pytest.mark.parametrize("preset", STAGES)
def test_deleting_the_engine_frees_everything(rank, world_size, preset):
    config = {"preset": preset, "precision": {"compute": "bf16"}}
    with StorageObserver() as observer:
        # A first engine shows the observer the constants that serve the whole process: one NaN for all stand-ins,
        # zeros for padding. Gloo's threads may hold what they sent for a moment longer, here and at the end.
        train("gpt", config, rank, steps=1)
        gc.collect()
        time.sleep(0.2)
        before = observer.current_bytes
        engine = start("gpt", config)
        train_step(engine, rank, 0)
        assert observer.current_bytes > before + 100_000
        reference = weakref.ref(engine)
        del engine
        gc.collect()
        assert reference() is None
        deadline = time.monotonic() + 5
        while observer.current_bytes > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert observer.current_bytes <= before


@ranks(2)
def test_backward_twice_in_one_step_says_what_to_do(rank, world_size):
    engine = start("mlp", {"preset": "zero1"})
    engine.backward(engine(make_batch(engine.module, rank, 0)))
    with pytest.raises(RuntimeError, match="already reduced in this step"):
        engine.backward(engine(make_batch(engine.module, rank, 1)))
    engine.destroy()


def test_steps_are_logged_when_asked(caplog):
    engine = start("mlp", {"preset": "zero1", "runtime": {"steps_per_print": 2, "timers": True}})
    with caplog.at_level("INFO", logger="shardwise"):
        for step in range(4):
            train_step(engine, 0, step)
    assert [record.getMessage().split(",")[0] for record in caplog.records] == ["step 2", "step 4"]
    engine.destroy()


@ranks(2)
def test_the_report_has_memory_wire_and_time(rank, world_size):
    engine = start("gpt", {"preset": "zero2"})
    train_step(engine, rank, 0)
    report = engine.report()
    assert report.sent_bytes["reduce"] > 0
    assert report.sent_bytes["gather"] > 0
    assert report.peak_bytes >= sum(report.memory_bytes.values())
    text = str(report)
    for word in ("weights", "optim", "reduce", "update", "ms"):
        assert word in text
    engine.destroy()
