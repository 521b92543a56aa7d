"""Where a unit first reads the values of its parameters: the model, or the origin of a parameter built without any."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.partition import Layout, Span
from shardwise.partition.dtensors import local

ORIGIN = "_shardwise_origin"
"""The attribute of a parameter that is built without values (see `deferred`): a function of a part of its flat elements
that returns the values there."""
SHARED_ORIGIN = "_shardwise_shared_origin"
"""The same for values that the ranks hold together: a function that returns all flat elements. A collective."""


def has_origin(param: torch.Tensor) -> bool:
    return hasattr(param, ORIGIN) or hasattr(param, SHARED_ORIGIN)


def read_values(flat: torch.Tensor, layout: Layout, params: Sequence[torch.Tensor], needed: Span) -> None:
    """Fill `flat` with the values of the parameters; from origins, only the elements in `needed`. Origins are used
    once."""
    for slot, param in zip(layout.slots, params, strict=True):
        origin, shared = param.__dict__.pop(ORIGIN, None), param.__dict__.pop(SHARED_ORIGIN, None)
        if shared is not None:
            flat[slot.span.slice].copy_(shared())
        elif origin is None:
            flat[slot.span.slice].copy_(local(param).detach().reshape(-1))
        elif part := slot.span.intersect(needed):
            flat[part.slice].copy_(origin(part.shift(-slot.span.start)))
