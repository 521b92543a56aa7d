"""A small chain of layers under an engine, and its data: what the tests of conduct and of gradients train."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import shardwise
from support.awkward import WIDTH, Chain
from support.training import make_sgd


def begin(
    preset: str, make: Callable[[], nn.Module] = Chain, optimizer: Callable[..., Any] = make_sgd, **config: Any
) -> shardwise.Engine:
    torch.manual_seed(3)
    model = make()
    return shardwise.initialize(model, optimizer(model), {"preset": preset, **config})


def data(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def weights(engine: shardwise.Engine) -> dict[str, torch.Tensor]:
    """All parameters, whole. A collective."""
    return {name: engine.full_param(name) for name, _ in engine.module.named_parameters()}


def assert_same(first: dict[str, torch.Tensor], *others: dict[str, torch.Tensor]) -> None:
    """All of them have the same bits."""
    for other in others:
        assert first.keys() == other.keys()
        for name, value in first.items():
            assert torch.equal(value, other[name]), name
