"""Contract C1: the same bits whatever the stage and the prefetch depth."""

import pytest
import torch

import shardwise
from support import matrix, ranks
from support.training import (
    PRECISIONS,
    digest,
    make_batch,
    make_model,
    make_optimizer,
    make_sgd,
    start,
    train,
    train_step,
)

STAGES = ["zero0", "zero1", "zero2", "zero3"]
ORDER = {"zero0": "local", "zero1": "local", "zero2": "sharded", "zero3": "sharded"}
# A scale with which these models do not overflow.


def config(preset, precision="fp32", accumulation=1, order=None, prefetch=1, clip=None, **more):
    gradients = {"clip_norm": clip, **({"order": order} if order else {}), **more}
    return {
        "preset": preset,
        "precision": PRECISIONS[precision],
        "batch": {"accumulation": accumulation},
        "gradients": gradients,
        "runtime": {"prefetch": prefetch},
    }


@matrix(
    {
        "preset": STAGES,
        "precision": list(PRECISIONS),
        "accumulation": [1, 3],
        "order": ["local", "sharded"],
        "world_size": [1, 2, 3, 4],
        "prefetch": [0, 1, 2],
        "clip": [None, 0.05],
        "model": ["mlp", "gpt", "odd"],
    },
)
@ranks()
def test_every_placement_gives_the_same_bits(
    rank, world_size, preset, precision, accumulation, order, prefetch, clip, model
):
    common = {"precision": precision, "accumulation": accumulation, "order": order, "clip": clip}
    expected = train(model, config("zero0", prefetch=0, **common), rank)
    seen = train(model, config(preset, prefetch=prefetch, **common), rank)
    assert seen == expected
    assert len(set(expected)) == len(expected), "training did not change the weights"


@ranks(2)
def test_the_two_orders_of_accumulation_are_two_classes_of_bits(rank, world_size):
    local = train("mlp", config("zero1", accumulation=3, order="local"), rank)
    sharded = train("mlp", config("zero1", accumulation=3, order="sharded"), rank)
    assert local != sharded


@ranks(2, 3, 4)
@pytest.mark.parametrize("preset", STAGES)
def test_one_ulp_in_one_gradient_of_one_rank_changes_everything(rank, world_size, preset):
    """SGD, so that the change reaches the momentum as it is; Adam multiplies it with 0.1 and may round it away."""
    one = torch.ones(())
    expected = train_with_planted_gradient(rank, world_size, preset, one)
    seen = train_with_planted_gradient(rank, world_size, preset, torch.nextafter(one, 2 * one))
    assert seen[0] == expected[0]
    assert seen[1] != expected[1]
    assert seen[2] != expected[2]


def train_with_planted_gradient(rank, world_size, preset, value):
    """Hashes of three steps; in the second, one element has gradient `value` on the last rank and none on others."""

    def plant(grad):
        grad = grad.clone()
        grad[3, 7] = value if rank == world_size - 1 else 0.0
        return grad

    engine = start("mlp", config(preset), make_sgd)
    hashes = []
    for step in range(3):
        handle = engine.module.layers[4].weight.register_hook(plant) if step == 1 else None
        train_step(engine, rank, step)
        if handle is not None:
            handle.remove()
        hashes.append(digest(engine))
    engine.destroy()
    return hashes


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_stage_0_agrees_with_ddp(rank, world_size, accumulation):
    engine = start("gpt", config("zero0", accumulation=accumulation), make_sgd)
    model = make_model("gpt")
    reference = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = make_sgd(model)
    for step in range(3):
        train_step(engine, rank, step)
        for micro in range(accumulation):
            (reference(make_batch(model, rank, step * accumulation + micro)) / accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, param in model.named_parameters():
        torch.testing.assert_close(engine.full_param(name), param.detach(), rtol=1e-5, atol=1e-6)
    engine.destroy()


@matrix(
    {
        "preset": STAGES,
        "world_size": [1, 2, 3, 4],
        "accumulation": [1, 3],
        "clip": [None, 0.05],
        "model": ["mlp", "gpt", "odd"],
        "min_unit_bytes": [1, 20_000, 10**9],
    }
)
@ranks()
def test_deterministic_equals_one_process_in_rank_order(
    rank, world_size, preset, accumulation, clip, model, min_unit_bytes
):
    settings = config(preset, accumulation=accumulation, clip=clip, deterministic=True)
    settings["runtime"]["min_unit_bytes"] = min_unit_bytes
    engine = start(model, settings)
    alone = OneProcess(model, world_size, accumulation, ORDER[preset], clip)
    for step in range(2):
        train_step(engine, rank, step)
        alone.step(step)
        assert engine.grad_norm.item() == pytest.approx(alone.norm, rel=1e-12)
        for name, param in alone.model.named_parameters():
            assert torch.equal(engine.full_param(name), param.detach()), (name, step)
    engine.destroy()


class OneProcess:
    """What the ranks do together, done by one process: gradients added up in rank order.

    The fused kernel gives the elements in its vector tail other bits, so parameters are padded to whole vectors.
    """

    def __init__(self, model, world_size, accumulation, order, clip):
        self.model = make_model(model)
        self.optimizer = make_optimizer(self.model)
        self.padded = {name: pad(param) for name, param in self.model.named_parameters() if param.requires_grad}
        by_id = {id(param): self.padded.get(name) for name, param in self.model.named_parameters()}
        for group in self.optimizer.param_groups:
            group["params"] = [by_id[id(param)] for param in group["params"]]
            group["fused"] = True
        self.world_size, self.accumulation, self.order, self.clip = world_size, accumulation, order, clip
        self.norm = None

    def step(self, step):
        local = [
            [self.gradients(rank, step, micro) for micro in range(self.accumulation)] for rank in range(self.world_size)
        ]
        if self.order == "local":
            total = self.mean([self.add_up(micros) for micros in local])
        else:
            total = self.add_up([self.mean([micros[k] for micros in local]) for k in range(self.accumulation)])
        squares = [grad.double().square().sum() for grad in total.values()]
        self.norm = torch.stack(squares).sum().sqrt().item()
        coefficient = torch.tensor(min(1.0, self.clip / (self.norm + 1e-6)) if self.clip else 1.0)
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                self.padded[name].grad = pad(total[name] * coefficient).detach()
        self.optimizer.step()
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                param.data.view(-1).copy_(self.padded[name].detach()[: param.numel()])

    def gradients(self, rank, step, micro):
        self.model.zero_grad()
        loss = self.model(make_batch(self.model, rank, step * self.accumulation + micro))
        (loss * (1.0 / self.accumulation) if self.accumulation > 1 else loss).backward()
        return {
            name: torch.zeros_like(param) if param.grad is None else param.grad.clone()
            for name, param in self.model.named_parameters()
            if param.requires_grad
        }

    @staticmethod
    def add_up(parts):
        total = {name: grad.clone() for name, grad in parts[0].items()}
        for part in parts[1:]:
            for name, grad in part.items():
                total[name] += grad
        return total

    def mean(self, parts):
        return {name: grad * (1.0 / self.world_size) for name, grad in self.add_up(parts).items()}


def pad(tensor):
    flat = tensor.detach().reshape(-1)
    return torch.nn.Parameter(torch.nn.functional.pad(flat, (0, -flat.numel() % 32)))


class Cross(torch.nn.Module):
    """Attends to a tensor that other modules attend to as well."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x, memory):
        attended = torch.nn.functional.scaled_dot_product_attention(self.query(x), self.key(memory), self.value(memory))
        return x + attended


class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Linear(16, 16)
        self.layers = torch.nn.ModuleList(Cross() for _ in range(4))

    def forward(self, x):
        memory = torch.tanh(self.encoder(x))
        for layer in self.layers:
            x = layer(x, memory)
        return x.square().mean()


@pytest.mark.parametrize("preset", STAGES)
def test_gradients_of_one_tensor_are_added_in_plain_torchs_order(preset):
    """Whatever the units are: four modules are given the same tensor."""

    def trained(units):
        torch.manual_seed(0)
        model = Decoder()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        config = {"preset": preset, "gradients": {"deterministic": True}, "runtime": {"units": units}}
        engine = shardwise.initialize(model, optimizer, config) if units else None
        for _ in range(3):
            loss = (engine or model)(torch.randn(2, 8, 16))
            engine.backward(loss) if engine else loss.backward()
            (engine or optimizer).step()
            (engine or optimizer).zero_grad()
        names = [name for name, _ in model.named_parameters()]
        values = [engine.full_param(name) if engine else model.get_parameter(name).detach() for name in names]
        found = torch.cat([value.flatten() for value in values])
        if engine:
            engine.destroy()
        return found

    plain = trained(None)
    for units in (["Cross"], ["Linear"]):
        assert torch.equal(trained(units), plain), units


@ranks(2, 3)
def test_exact_norm_depends_on_the_values_alone(rank, world_size):
    from shardwise.comm import ProcessGroupComm
    from shardwise.unit.norm import exact_norm

    torch.manual_seed(3)
    values = torch.randn(world_size * 4096) * torch.logspace(-12, 6, world_size * 4096)
    comm = ProcessGroupComm(None, torch.device("cpu"))
    mine = values.view(world_size, -1)[rank]
    norms = set()
    for cut in (1, 100, 2048, 4095):
        norms.add(exact_norm([mine[:cut], mine[cut:]], comm).item())
    shuffled = values[torch.randperm(values.numel(), generator=torch.Generator().manual_seed(1))]
    norms.add(exact_norm([shuffled.view(world_size, -1)[rank]], comm).item())
    norms.add(exact_norm([mine, torch.zeros(5000)], comm).item())
    assert len(norms) == 1
    assert norms.pop() == pytest.approx(values.double().norm().item(), rel=1e-9)
    assert not exact_norm([mine * torch.inf], comm).isfinite()
    comm.close()
