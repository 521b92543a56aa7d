"""From reduced gradients to what an update multiplies them with: the global norm, the loss scale and clipping.

All of it stays on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from shardwise.comm.comm import Comm
from shardwise.unit import norm
from shardwise.unit.grads import Grads


class Clip(NamedTuple):
    """The norm without the loss scale, whether gradients overflowed, and 1/scale and clipping in one number."""

    grad_norm: torch.Tensor
    overflow: torch.Tensor | None
    coefficient: torch.Tensor | None


def global_norm(grads: Sequence[Grads], comm: Comm, exact: bool) -> torch.Tensor:
    """The global norm. Shards on the host left their part of it here; only the exact norm brings them back."""
    if exact:
        return norm.global_norm(_Shards(grads), comm, exact=True)
    here = [each.reduced for each in grads if not each.is_away]
    if len(here) == len(grads):
        return norm.global_norm(here, comm, exact=False)
    known = iter(norm.sums_of_squares(here, comm)) if here else iter(())
    sums = torch.stack([each.sum_of_squares if each.is_away else next(known) for each in grads])
    return norm.norm_from_sums(sums, comm)


def unscale(grad_norm: torch.Tensor, scale: torch.Tensor | None, limit: float | None) -> Clip:
    """From the norm of gradients of a loss that was multiplied with `scale`."""
    overflow = None
    if scale is not None:
        overflow = ~grad_norm.isfinite()
        grad_norm = grad_norm / scale
    coefficient = norm.clip_coefficient(grad_norm, limit) if limit else None
    if scale is not None:
        coefficient = (1.0 if coefficient is None else coefficient) / scale
    # With a dimension it takes part in promotion: its product with gradients of 16 bits is computed and stored in fp32.
    return Clip(grad_norm, overflow, None if coefficient is None else coefficient.view(1))


class _Shards(Sequence[torch.Tensor]):
    """Reduced shards, of which those on the host are brought to the device one at a time."""

    def __init__(self, grads: Sequence[Grads]) -> None:
        self._grads = grads

    def __len__(self) -> int:
        return len(self._grads)

    def __getitem__(self, index: Any) -> Any:
        return self._grads[index].reduced
