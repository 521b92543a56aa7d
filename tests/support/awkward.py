"""Models with unusual structure, as data: the tests train each of them, and docs/models.md lists them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 8
COLLECTED: list[torch.Tensor] = []
"""Losses that a model stores outside of its modules and outputs, where the engine cannot find them."""

Loss = Callable[[nn.Module, Any, torch.Tensor], torch.Tensor]


def square(model: nn.Module, output: Any, x: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


@dataclasses.dataclass(frozen=True)
class Case:
    """A model that trains as in plain torch: its description in the docs, and how the engine treats it."""

    what: str
    how: str
    build: Callable[[], nn.Module]
    loss: Loss = square


CASES: dict[str, Case] = {}


def case(what: str, how: str, loss: Loss = square) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def register(build: type[nn.Module]) -> type[nn.Module]:
        CASES[build.__name__] = Case(what, how, build, loss)
        return build

    return register


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def block() -> nn.Sequential:
    return nn.Sequential(linear(), nn.Tanh(), linear())


class Chain(nn.Module):
    """Blocks in a row: the base of most cases."""

    def __init__(self, make: Callable[[], nn.Module] = block, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(count))
        self.last = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


@case("tied weights, across units", "one unit owns them, and is gathered for every module that holds them")
class Tied(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.first = linear()
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.first(x))


@case(
    "a module called several times, another never",
    "the first is reduced once, after the backward of its first call; the other is reduced as zeros",
)
class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(3))
        self.spare = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.layers[0], self.layers[1], self.layers[0], self.layers[2]):
            x = torch.tanh(layer(x))
        return x


@case("a module that calls itself", "the outermost call releases the unit when it returns")
class Recursive(Chain):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()

        def forward(self, x: torch.Tensor, depth: int = 1) -> torch.Tensor:
            x = torch.tanh(self.inner(x))
            return self(x, depth - 1) + self.inner(x) if depth else x

    def __init__(self) -> None:
        super().__init__(self.Block)


@case(
    "modules skipped in some steps", "each forward records the order of its units; skipped units are reduced as zeros"
)
class Skips(Chain):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for index, layer in enumerate(self.layers):
            x = x if index == self.calls % 3 else layer(x)
        return self.last(x)


@case("blocks inside blocks", "the outermost repeated blocks become units")
class Nested(Chain):
    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(block(), block(), linear()))


@case(
    "`F.linear(x, other.weight)`, `other.weight.t()`",
    "the unit is gathered when its weight is used, and again for the backward of the module that used it",
)
class External(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.first = linear()
        self.spare = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(self.first(x))
        x = x + F.linear(x, self.layers[0][0].weight)
        return x @ self.first.weight.t() @ (self.spare.weight * 2)


@case(
    "blocks that use the weights of a module outside of them, before that module runs",
    "the same; the unit is reduced at the end of the backward",
)
class Borrows(Chain):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = linear()
            self.lender: list[nn.Linear] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.own(x)) @ self.lender[0].weight.t()

    def __init__(self) -> None:
        super().__init__(self.Block)
        for layer in self.layers:
            layer.lender.append(self.last)


@case("a parameter among the outputs", "works; read it inside the model, or inside `shardwise.gathered`")
class ReturnsParameter(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.out = (x, self.scale)
        return super().forward(x) * self.scale


@case("parameters without elements, partly frozen blocks", "empty parameters and gradients of frozen ones are not sent")
class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(2))
        self.layers[0].requires_grad_(False)
        self.layers[0].extra = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@case("in-place operations on inputs", "works")
class InPlace(Chain):
    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.ReLU(inplace=True), linear()))
        self.first = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.first(x))


@case("outputs that are views, changed in place afterwards", "works where plain torch does")
class Views(Chain):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, 2 * WIDTH)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            left, right = self.inner(x).split(WIDTH, dim=1)
            return left, right

    def __init__(self) -> None:
        super().__init__(self.Block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            left, right = layer(x)
            x = left.clone().mul_(0.5).add_(right.tanh())
        x = self.last(x)
        x += 1
        return x


@dataclasses.dataclass
class Packed:
    parts: dict[str, list[torch.Tensor]]


class Envelope:
    """An object of a class that the engine does not know."""

    __slots__ = ("content",)

    def __init__(self, content: Any) -> None:
        self.content = content


class Carrier:
    def __init__(self, content: Any) -> None:
        self.envelope = Envelope((content,))


class Returns(Chain):
    """Blocks whose outputs are wrapped; the model unwraps them."""

    class Block(nn.Module):
        def __init__(self, wrap: Callable[[torch.Tensor], Any]) -> None:
            super().__init__()
            self.inner, self.wrap = linear(), wrap

        def forward(self, x: torch.Tensor) -> Any:
            return self.wrap(torch.tanh(self.inner(x)))

    def __init__(self, wrap: Callable[[torch.Tensor], Any], unwrap: Callable[[Any], torch.Tensor]) -> None:
        super().__init__(lambda: self.Block(wrap))
        self.unwrap = unwrap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.unwrap(layer(x))
        return self.last(x)


@case("outputs in dicts, lists and dataclasses", "the engine finds the tensors")
class ReturnsPacked(Returns):
    def __init__(self) -> None:
        super().__init__(lambda x: Packed({"x": [x]}), lambda packed: packed.parts["x"][0])


@case("outputs in objects of any class", "the engine finds the tensors in attributes and slots")
class ReturnsObjects(Returns):
    def __init__(self) -> None:
        super().__init__(Carrier, lambda carrier: carrier.envelope.content[0])


class Gated(nn.Module):
    """A block with a loss beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.gate = nn.Sequential(linear(), nn.Tanh(), nn.Linear(WIDTH, 3))

    def aside(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(x).square().mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = torch.tanh(self.inner(x))
        self.loss = self.aside(x)
        return output


def with_kept(model: nn.Module, output: Any, x: torch.Tensor) -> torch.Tensor:
    return square(model, output, x) + sum(layer.loss for layer in model.layers)


def with_collected(model: nn.Module, output: Any, x: torch.Tensor) -> torch.Tensor:
    losses = [*COLLECTED]
    COLLECTED.clear()
    return square(model, output, x) + sum(losses)


@case(
    "auxiliary losses in attributes of a module (`self.aux_loss = ...`)",
    "the engine searches the attributes of modules, and short lists, tuples and dicts in them",
    with_kept,
)
class KeepsLosses(Chain):
    def __init__(self) -> None:
        super().__init__(Gated)


@case(
    "auxiliary losses in a list of your own, made before the module's output",
    "the backward reaches them after the output, when the unit is gathered",
    with_collected,
)
class CollectsLosses(Chain):
    class Block(Gated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            COLLECTED.append(self.aside(x))
            return torch.tanh(self.inner(x))

    def __init__(self) -> None:
        super().__init__(self.Block)


def with_penalty(model: nn.Module, output: Any, x: torch.Tensor) -> torch.Tensor:
    loss = square(model, output, x)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + (grad.square().sum() - 1).square()


@case(
    "double backward: gradient penalties, `create_graph=True`",
    "units stay gathered from the first backward until `step()`; use `engine.backward(loss)`",
    with_penalty,
)
class Penalised(Chain):
    pass


@case(
    "models that differentiate themselves: forces from an energy",
    "`torch.autograd.grad` works inside a forward as it does outside",
)
class Forces(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (force,) = torch.autograd.grad(super().forward(x).square().sum(), x, create_graph=True)
        return force


def after_autograd_grad(model: nn.Module, output: Any, x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        (grad,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
        assert not grad.isnan().any()
    local = torch.autograd.grad(output.sum(), [model.last.weight, model.last.bias], retain_graph=True)
    assert not any(grad.isnan().any() for grad in local)
    return square(model, output, x)


@case(
    "`torch.autograd.grad` on inputs, activations or parameters",
    "returns this rank's gradients and does not change the accumulated ones",
    after_autograd_grad,
)
class AutogradGrad(Chain):
    pass


@case("`torch.nn.utils.parametrizations` (weight norm, orthogonal)", "the original weights are ordinary parameters")
class Parametrized(Chain):
    def __init__(self) -> None:
        super().__init__(lambda: parametrizations.weight_norm(linear()))
        self.last = parametrizations.orthogonal(self.last)


@case("the older `torch.nn.utils.weight_norm`", "its hook runs before the engine's, and its read gathers the unit")
class WeightNormed(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.utils.weight_norm(self.last)


@case("`ParameterList` and `ParameterDict`", "works")
class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 3 for _ in range(3))
        self.named = nn.ParameterDict({"scale": torch.ones(WIDTH), "shift": torch.zeros(WIDTH)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x * self.named["scale"] + self.named["shift"]


@case(
    "convolutions, BatchNorm, buffers",
    "all ranks start with the buffers of rank 0; afterwards each rank updates its own",
)
class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), nn.BatchNorm1d(2), nn.GELU()) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, 2, WIDTH // 2)
        for layer in self.layers:
            x = layer(x)
        return x


@case("recurrent networks", "works; `flatten_parameters` has no effect under an engine")
class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.lstm.flatten_parameters()
        hidden, _ = self.lstm(x.unsqueeze(0))
        return self.gru(hidden)[0]


@case("`nn.TransformerEncoder`", "works")
class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x.unsqueeze(0))


@case(
    "LoRA: frozen weights and trainable adapters of another dtype in one block",
    "separate units; the frozen one is gathered and never reduced",
)
class Adapted(Chain):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = linear().bfloat16().requires_grad_(False)
            self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            base = F.linear(x, self.base.weight.to(x.dtype), self.base.bias.to(x.dtype))
            return torch.tanh(base + self.up(self.down(x)))

    def __init__(self) -> None:
        super().__init__(self.Block)


@case(
    "mixtures of experts, some of which get no token",
    "a block is never divided, so all ranks gather the same units; experts without tokens are reduced as zeros; "
    "for smaller units see [what ranks may do differently](agreement.md#what-ranks-may-do-differently)",
)
class Experts(Chain):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 4)
            self.experts = nn.ModuleList(linear() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights, chosen = self.router(x).softmax(dim=1).max(dim=1)
            output = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                rows = (chosen == index).nonzero().view(-1)
                if len(rows):
                    output = output.index_add(0, rows, torch.tanh(expert(x[rows])) * weights[rows, None])
            return x + output

    def __init__(self) -> None:
        super().__init__(self.Block)


class Checkpointed(Chain):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.last(x)


@case(
    "activation checkpointing, re-entrant or not", "a unit is gathered once for its recomputation and backward together"
)
class CheckpointedAgain(Checkpointed):
    reentrant = True


CASES["Checkpointed"] = dataclasses.replace(CASES["CheckpointedAgain"], build=Checkpointed)


@case(
    "weights used inside a re-entrant checkpoint and outside of it",
    "the backward of a checkpoint does not know of the other use, so the unit is reduced at the end",
)
class CheckpointedAndBorrowed(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.spare = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(x, self.layers[0][0].weight)
        x = x + functional_call(self.last, dict(self.spare.named_parameters()), (x,))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return self.last(x)
