"""Small trainings that end in hashes: what the tests of bits, memory and wire have in common."""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import shardwise
from shardwise.engine.report import Report
from shardwise.models.built_in import GPT, MLP
from shardwise.optim.states import PARAM, extras_of, state_views
from shardwise.unit.unit import Unit

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"compute": "fp32"},
    "bf16": {"compute": "bf16"},
    "fp16": {"compute": "fp16", "loss_scale": {"initial": 256.0}},
}


class Odd(nn.Module):
    """Sizes that divide by nothing, a scalar, an empty and an unused parameter, a buffer, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.unused = nn.Linear(13, 13)
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.last = nn.Linear(13, 5)
        self.register_buffer("shift", torch.ones(13))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x)) + self.shift.to(x.dtype)
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return self.last(self.frozen(x)).float().square().mean()


def make_model(name: str) -> nn.Module:
    torch.manual_seed(17)
    if name == "mlp":
        return MLP(width=40, depth=5)
    if name == "gpt":
        return GPT(hidden=32, layers=3, heads=2, vocabulary=61, length=16)
    if name == "tied":
        return GPT(hidden=32, layers=3, heads=2, vocabulary=61, length=16, tied=True)
    return Odd()


def make_batch(model: nn.Module, rank: int, index: int) -> torch.Tensor:
    """Data of one micro-batch of one rank, the same whatever else is chosen."""
    generator = torch.Generator().manual_seed(1000 * index + rank)
    if isinstance(model, GPT):
        return torch.randint(model.vocabulary, (2, model.length), generator=generator)
    return torch.randn(6, getattr(model, "width", 7), generator=generator)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with two groups: matrices decay, the rest does not and learns faster."""
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [param for param in params if param.ndim >= 2]},
            {"params": [param for param in params if param.ndim < 2], "lr": 3e-3, "weight_decay": 0.0},
        ],
        lr=1e-3,
        weight_decay=0.1,
    )


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum: small differences in gradients stay small, where Adam would divide by their size."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def start(
    name: str, config: dict[str, Any], optimizer: Callable[[nn.Module], torch.optim.Optimizer] = make_optimizer
) -> shardwise.Engine:
    model = make_model(name)
    return shardwise.initialize(model, optimizer(model), config)


def train(name: str, config: dict[str, Any], rank: int, steps: int = 3) -> list[str]:
    """Train and return the hash of weights, master copies and moments after every step."""
    engine = start(name, config)
    hashes = []
    for step in range(steps):
        train_step(engine, rank, step)
        hashes.append(digest(engine))
    engine.destroy()
    return hashes


def train_step(engine: shardwise.Engine, rank: int, step: int) -> float:
    count = engine.config.batch.accumulation
    loss = torch.zeros(())
    for micro in range(count):
        loss = engine(make_batch(engine.module, rank, step * count + micro))
        engine.backward(loss)
        engine.step()
    return loss.item()


def digest(engine: shardwise.Engine) -> str:
    """sha256 over every weight as it computes, every master copy and every moment."""
    sha = hashlib.sha256()
    state, values = engine.state_dict(), whole_values(engine)
    for name, _ in engine.module.named_parameters():
        for tensor in (state[name], *(value for _, value in sorted(values[name].items()))):
            assert not tensor.isnan().any(), f"{name} has NaN"
            sha.update(content(tensor).cpu().numpy().tobytes())
    return sha.hexdigest()


def content(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor; where there is a GPU, two numbers that it makes of every bit and its place, because the
    CPU would take minutes for the states of models that are large enough to be of use there."""
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    if not torch.cuda.is_available():
        return raw
    words = nn.functional.pad(raw.cuda(), (0, -raw.numel() % 8)).view(torch.int64)
    places = torch.arange(words.numel(), device="cuda")
    mixed = words + places * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 0x2545F4914F6CDD1D)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return torch.stack([mixed.sum(), (mixed ^ (mixed >> 29)).sum()])


def trained(
    name: str,
    settings: Any,
    rank: int,
    looks: bool = False,
    optimizer: Callable[..., Any] = make_optimizer,
    steps: int = 4,
) -> tuple[list[str], Report]:
    """Hashes after each step, or of the last alone: then nothing looks at the states in between; and the report."""
    engine = start(name, settings, optimizer)
    hashes = []
    for step in range(steps):
        train_step(engine, rank, step)
        if looks or step == steps - 1:
            hashes.append(digest(engine))
    report = engine.report()
    engine.destroy()
    return hashes, report


def whole_values(engine: shardwise.Engine) -> dict[str, dict[str, torch.Tensor]]:
    """`full_param` and `full_state` of all parameters: each unit is gathered once, not once for each parameter.

    test_engine compares the two.
    """
    mine = {unit.name: _owned_values(unit, engine.optimizer) for unit in engine.units}
    # Ranks own different parts, some of them none: what there is to gather is agreed upon first.
    told = {key: flat.dtype for flats in mine.values() for key, flat in flats.items()}
    extras = {
        (name, extra.key): extra.value.cpu()
        for unit in engine.units
        for extra in extras_of(unit, engine.optimizer)
        for name in unit.names
        if isinstance(extra.value, torch.Tensor) and extra.value.ndim == 0
        if unit.layout.slot(name).span.intersect(extra.span)
    }
    everyone = engine.units[0].comm.share_object((told, extras))
    values: dict[str, dict[str, torch.Tensor]] = {name: {} for unit in engine.units for name in unit.names}
    for key, dtype in sorted({key: dtype for kinds, _ in everyone for key, dtype in kinds.items()}.items()):
        for unit in engine.units:
            if key == PARAM or unit.is_trainable:
                empty = torch.zeros(unit.weights.owned.numel, dtype=dtype, device=unit.weights.master.device)
                flat = unit.weights.whole(mine[unit.name].get(key, empty))
                for name in unit.names:
                    values[name][key] = unit.view(flat, name)
    for _, found in reversed(everyone):
        for (name, key), value in found.items():
            values[name][key] = value
    return values


def _owned_values(unit: Unit, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """What this rank holds of a unit, each key flat over what it owns."""
    unit.weights.wait_gather()
    flats: dict[str, torch.Tensor] = {}
    for held in state_views(unit, optimizer):
        part = held.read(held.span)
        flat = flats.setdefault(held.key, part.new_zeros(unit.weights.owned.numel))
        flat[held.span.shift(-unit.weights.owned.start).slice] = part
    return flats
