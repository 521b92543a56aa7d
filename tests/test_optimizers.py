"""Several optimizers as one, and those that need whole tensors: Muon beside AdamW, as one process would run them."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import shardwise
from shardwise.errors import ConfigWarning
from shardwise.optim.optimizers import Joint
from shardwise.optim.probe import Scope, scope_of
from support import matrix, ranks
from support.training import digest, make_batch, make_model, start, train_step

STAGES = ["zero0", "zero1", "zero2", "zero3"]


def make_muon(model):
    """What people do with Muon: the matrices of hidden layers; embeddings, head and vectors by AdamW."""
    inner = {id(param) for param in model.blocks.parameters() if param.ndim == 2}
    params = list(model.parameters())
    return [
        torch.optim.Muon([param for param in params if id(param) in inner], lr=0.02),
        torch.optim.AdamW([param for param in params if id(param) not in inner], lr=1e-3),
    ]


def make_adafactor(model):
    return torch.optim.Adafactor(model.parameters(), lr=0.01)


def alone(make, world_size, count, order, steps):
    """One process that does the work of all ranks and adds their gradients up in rank order."""
    model = make_model("gpt")
    made = make(model)
    optimizers = made if isinstance(made, list) else [made]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.update({"fused": True} if "fused" in group else {})
    for step in range(steps):
        grads = [[gradients(model, rank, step * count + k, count) for k in range(count)] for rank in range(world_size)]
        if order == "local":
            total = mean([add(micros) for micros in grads])
        else:
            total = add([mean([micros[k] for micros in grads]) for k in range(count)])
        for param, grad in zip(model.parameters(), total, strict=True):
            param.grad = grad
        for optimizer in optimizers:
            optimizer.step()
    return model


def gradients(model, rank, index, count):
    loss = model(make_batch(model, rank, index))
    return torch.autograd.grad(loss * (1.0 / count) if count > 1 else loss, list(model.parameters()))


def add(parts):
    total = [grad.clone() for grad in parts[0]]
    for part in parts[1:]:
        torch._foreach_add_(total, list(part))
    return total


def mean(parts):
    return [grad * (1.0 / len(parts)) for grad in add(parts)]


@ranks()
@matrix(
    {
        "world_size": [1, 2, 3, 4],
        "preset": STAGES,
        "count": [1, 2],
        "make": [make_muon, make_adafactor],
    }
)
def test_matrix_optimizers_equal_one_process(rank, world_size, preset, count, make):
    engine = start("gpt", {"preset": preset, "batch": {"accumulation": count}}, make)
    for step in range(3):
        train_step(engine, rank, step)
    order = "local" if preset in ("zero0", "zero1") else "sharded"
    expected = alone(make, world_size, count, order, steps=3)
    for name, param in expected.named_parameters():
        assert torch.equal(engine.full_param(name), param.detach()), name
    engine.destroy()


@ranks(3)
def test_every_stage_gives_the_same_bits_in_bf16(rank, world_size):
    hashes = set()
    for preset in STAGES:
        config = {"preset": preset, "precision": {"compute": "bf16"}, "gradients": {"clip_norm": 0.5}}
        engine = start("gpt", config, make_muon)
        for step in range(2):
            train_step(engine, rank, step)
        hashes.add(digest(engine))
        engine.destroy()
    assert len(hashes) == 1


@ranks(2)
def test_each_matrix_has_one_owner_and_its_own_shape(rank, world_size):
    engine = start("gpt", {"preset": "zero3"}, make_muon)
    train_step(engine, rank, 0)
    muon = engine.optimizer.members[0]
    mine = [tuple(piece.shape) for group in muon.param_groups for piece in group["params"]]
    everyone = [shape for shapes in engine.units[0].comm.share_object(mine) for shape in shapes]
    inner = [tuple(param.shape) for param in make_model("gpt").blocks.parameters() if param.ndim == 2]
    assert 0 < len(mine) < len(inner)
    assert sorted(everyone) == sorted(inner)
    assert engine.full_state("blocks.0.up.weight")["momentum_buffer"].shape == (128, 32)
    assert set(engine.full_state("blocks.0.up.bias")) == {"exp_avg", "exp_avg_sq", "step"}
    engine.destroy()


@ranks(2)
def test_full_state_has_what_is_no_value_for_each_element(rank, world_size):
    engine = start("gpt", {"preset": "zero2"}, make_adafactor)
    train_step(engine, rank, 0)
    state = engine.full_state("blocks.1.up.weight")
    assert state["row_var"].shape == (128, 1)
    assert state["col_var"].shape == (1, 32)
    assert state["step"].item() == 1
    engine.destroy()


@ranks(4)
def test_units_grow_until_whole_tensors_are_spread_evenly(rank, world_size):
    """One layer's matrix would leave three of four ranks with padding alone."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(16)))
    engine = shardwise.initialize(model, torch.optim.Muon(model.parameters()), "zero3")
    assert len(engine.units) > 1
    for unit in engine.units:
        assert unit.layout.numel < 1.5 * unit.layout.used_numel
    engine.destroy()


@ranks(4)
def test_padding_beyond_the_unit_itself_is_warned_of(rank, world_size):
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("shardwise").addHandler(handler)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
    config = {"preset": "zero3", "runtime": {"units": ["Linear"]}}
    engine = shardwise.initialize(model, torch.optim.Muon(model.parameters()), config)
    logging.getLogger("shardwise").removeHandler(handler)
    assert messages[0] == (
        "unit 0 has too few whole tensors for 4 ranks: its 4096 elements take 16384; larger units "
        "(runtime.min_unit_bytes) are packed better"
    )
    engine.destroy()


class PerTensor(torch.optim.Optimizer):
    """Divides each tensor's gradient by its norm: wrong on anything but whole tensors."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad / param.grad.norm(), alpha=group["lr"])


@ranks(2)
def test_the_configuration_asks_for_whole_tensors(rank, world_size):
    def make(model):
        return PerTensor(model.parameters())

    engine = start("gpt", {"preset": "zero3", "runtime": {"whole_tensors": True}}, make)
    train_step(engine, rank, 0)
    expected = alone(make, world_size, 1, "sharded", steps=1)
    for name, param in expected.named_parameters():
        assert torch.equal(engine.full_param(name), param.detach()), name
    engine.destroy()


def test_schedulers_and_hooks_of_each_optimizer_still_work():
    model = make_model("gpt")
    muon, adamw = make_muon(model)
    calls = []
    adamw.register_step_post_hook(lambda optimizer, args, kwargs: calls.append(optimizer))
    schedulers = [torch.optim.lr_scheduler.StepLR(muon, 1, gamma=0.5)]
    engine = shardwise.initialize(model, [muon, adamw], "zero2")
    schedulers.append(torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, gamma=0.1))
    for step in range(2):
        train_step(engine, 0, step)
    for scheduler in schedulers:
        scheduler.step()
    assert calls == [adamw, adamw]
    assert [group["lr"] for group in engine.optimizer.param_groups] == pytest.approx([0.001, 1e-4])
    with pytest.raises(RuntimeError, match=r"call engine.step\(\)"):
        adamw.step()
    engine.destroy()


def test_a_joint_optimizer_keeps_its_state_over_saving():
    def make():
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))]
        return params, Joint([torch.optim.Muon(params[:1], lr=0.1), torch.optim.AdamW(params[1:], lr=0.1)])

    def step(params, joint):
        for param in params:
            param.grad = param.detach().cos()
        joint.step()

    params, joint = make()
    step(params, joint)
    restored_params, restored = make()
    with torch.no_grad():
        for target, source in zip(restored_params, params, strict=True):
            target.copy_(source)
    restored.load_state_dict(copy.deepcopy(joint.state_dict()))
    step(params, joint)
    step(restored_params, restored)
    for target, source in zip(restored_params, params, strict=True):
        assert torch.equal(target, source)


def test_optimizers_that_cannot_work_together_are_refused():
    model = nn.Linear(4, 4)
    both = [torch.optim.SGD(model.parameters()), torch.optim.AdamW([model.bias])]
    with pytest.raises(shardwise.ConfigError, match="more than one parameter group"):
        shardwise.initialize(model, both, "zero1")
    with pytest.raises(shardwise.ConfigError, match=r"does not hold the trainable parameter 'bias'"):
        shardwise.initialize(model, [torch.optim.Muon([model.weight])], "zero1")
    with pytest.raises(shardwise.ConfigError, match="a list of such optimizers"):
        shardwise.initialize(model, [], "zero1")


# Optimizers that shardwise does not know are tried on small tensors


class Lamb(torch.optim.Optimizer):
    """Adam's step, scaled by the ratio of two norms of the whole tensor."""

    def __init__(self, params, lr=0.01, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                self.update(param, param.grad, self.state[param], group)

    def update(self, param, grad, state, group):
        if not state:
            state["mean"], state["square"] = torch.zeros_like(param), torch.zeros_like(param)
        state["mean"].lerp_(grad, 1 - group["betas"][0])
        state["square"].lerp_(grad.square(), 1 - group["betas"][1])
        change = state["mean"] / (state["square"].sqrt() + 1e-6)
        ratio = param.norm() / change.norm()
        param.sub_(change * torch.where(ratio > 0, ratio, 1.0), alpha=group["lr"])


class Sign(Lamb):
    """Element by element, under a name that shardwise does not know."""

    def update(self, param, grad, state, group):
        param.sub_(grad.sign(), alpha=group["lr"])


class Counting(Lamb):
    """Counts its calls in the group."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for param in group["params"]:
                param.data.sub_(param.grad, alpha=group["lr"] / group["count"])


class Late(Lamb):
    """Needs whole tensors after ten steps."""

    def update(self, param, grad, state, group):
        state["count"] = state.get("count", 0) + 1
        param.sub_(grad if state["count"] <= 10 else grad / grad.norm(), alpha=group["lr"])


class Factored(Lamb):
    """Needs large matrices whole."""

    def update(self, param, grad, state, group):
        param.sub_(grad / grad.norm() if param.ndim == 2 and min(param.shape) >= 128 else grad, alpha=group["lr"])


class Coupled(Lamb):
    """Clips by the norm over all tensors."""

    def step(self, closure=None):
        params = [param for group in self.param_groups for param in group["params"]]
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        super().step()


class Noisy(Lamb):
    def update(self, param, grad, state, group):
        param.sub_(torch.randn_like(param), alpha=group["lr"])


class Wrapping(Lamb):
    """Cannot be built from its options alone."""

    def __init__(self, params, inner):
        super().__init__(params)
        self.inner = inner


def make_hf_adafactor(model):
    transformers = pytest.importorskip("transformers")
    return transformers.Adafactor(model.parameters(), lr=1e-2, relative_step=False, scale_parameter=True)


def make_lamb(model):
    return Lamb(model.parameters())


@pytest.mark.parametrize(
    ("make", "scope"),
    [
        (Lamb, "TENSOR"),
        (Sign, "ELEMENT"),
        (Late, "TENSOR"),
        (Factored, "TENSOR"),
        (Counting, "GROUP"),
        (Coupled, "GROUP"),
        (Noisy, "UNKNOWN"),
        (lambda params: Wrapping(params, inner=object()), "UNKNOWN"),
        (lambda params: make_hf_adafactor(nn.ParameterList(params)), "TENSOR"),
        (lambda params: type("Own", (torch.optim.AdamW,), {})(params, lr=0.0), "ELEMENT"),
        (lambda params: type("Own", (torch.optim.SGD,), {})(params, lr=torch.tensor(0.1), momentum=0.9), "ELEMENT"),
        (torch.optim.Muon, "TENSOR"),
        (torch.optim.NAdam, "ELEMENT"),
    ],
)
def test_the_scope_of_an_optimizer_is_found_without_a_trace(make, scope):
    params = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(5, 4))]
    optimizer = make(params)
    before, state = [param.detach().clone() for param in params], torch.get_rng_state()
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    calls = []
    hook = register_optimizer_step_pre_hook(lambda *_: calls.append(1))
    assert scope_of(optimizer, optimizer.param_groups[0], torch.device("cpu")) is Scope[scope]
    hook.remove()
    assert not calls
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), state)
    assert [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups] == (
        options
    )
    for param, value in zip(params, before, strict=True):
        assert torch.equal(param, value)
        assert param.grad is None


@ranks(1, 2)
@pytest.mark.parametrize("preset", ["zero1", "zero3", "zero3_offload"])
@pytest.mark.parametrize("make", [make_lamb, make_hf_adafactor])
def test_unknown_optimizers_get_what_they_need(rank, world_size, preset, make):
    engine = start("gpt", {"preset": preset}, make)
    for step in range(2):
        train_step(engine, rank, step)
    expected = alone(make, world_size, 1, "local" if preset == "zero1" else "sharded", steps=2)
    for name, param in expected.named_parameters():
        assert torch.equal(engine.full_param(name), param.detach()), name
    engine.destroy()


class Logging(Lamb):
    """Writes into its group what differs from rank to rank: the number of its calls, and a norm of what it updated."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            group["norm"] = sum(param.grad.norm().item() for param in group["params"])
        super().step()


@ranks(2)
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_what_an_optimizer_notes_in_its_groups_may_differ_between_ranks(rank, world_size, preset):
    engine = start("gpt", {"preset": preset}, lambda model: Logging(model.parameters()))
    for step in range(11):  # the tenth update compares the options of all ranks
        train_step(engine, rank, step)
    assert engine.steps == 11
    assert len(set(engine.comm.share_object(engine.optimizer.param_groups[0]["norm"]))) == 2
    engine.destroy()


@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_optimizers_that_no_cut_can_serve_are_refused(preset):
    model = make_model("gpt")
    for kind in (Counting, Coupled):
        with pytest.raises(shardwise.ConfigError, match=f"{kind.__name__}: its update of a tensor depends on other"):
            shardwise.initialize(model, kind(model.parameters()), preset)
    with pytest.raises(shardwise.ConfigError, match="LBFGS is not supported: it evaluates the loss several times"):
        shardwise.initialize(model, torch.optim.LBFGS(model.parameters()), preset)
    with pytest.raises(shardwise.ConfigError, match="SparseAdam is not supported"):
        shardwise.initialize(model, torch.optim.SparseAdam(model.parameters()), preset)
    with pytest.warns(ConfigWarning, match="so it gets every tensor whole"):
        engine = shardwise.initialize(model, Wrapping(model.parameters(), inner=object()), preset)
    engine.destroy()


@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_the_configuration_decides_without_a_probe(preset):
    model = make_model("gpt")
    config = {"preset": preset, "runtime": {"whole_tensors": False}}
    engine = shardwise.initialize(model, Coupled(model.parameters()), config)
    assert all(piece.ndim == 1 for group in engine.optimizer.param_groups for piece in group["params"])
    engine.destroy()
