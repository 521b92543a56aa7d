"""The origin of a parameter that was built without values: what computes or reads them; see `deferred`."""

from __future__ import annotations

from typing import Protocol

import torch

from shardwise.partition.layout import Span


class Origin(Protocol):
    """The values of one parameter."""

    def read(self, part: Span) -> torch.Tensor:
        """Those over `part` of its flat elements, flat."""


def origin_of(param: torch.Tensor) -> Origin | None:
    """None for a parameter that has its values."""
    origin: Origin | None = getattr(param, "_shardwise_origin", None)
    return origin


def set_origin(param: torch.Tensor, origin: Origin | None) -> None:
    """Say where the values come from; None once the parameter has them."""
    if origin is not None:
        param._shardwise_origin = origin  # type: ignore[attr-defined]  # ours, on torch's class
    elif hasattr(param, "_shardwise_origin"):
        del param._shardwise_origin
