"""The update of a unit whose states rest off the device: the same kernel, on one bucket after the other.

While a bucket is on the device, the optimizer's pieces and its state are views of a buffer of the pool; otherwise they
are what the storages say. State that the optimizer makes in its first step is copied down and rests there from then on.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from shardwise.offload.buckets import GRADS, MASTER, Bucket, NewMoments, Views
from shardwise.offload.offloaded_states import OffloadedStates
from shardwise.optim.frozen import check_none_frozen
from shardwise.optim.piece_optimizer import PieceOptimizer, options_now, scaled
from shardwise.optim.states import offload_moments, per_element, shares_storage
from shardwise.partition import Span
from shardwise.profiling import mark
from shardwise.unit import Unit


class StreamedUpdate:
    """One unit's pending update in one step: a `BucketUpdate`."""

    def __init__(
        self, optimizer: PieceOptimizer, unit: Unit, states: OffloadedStates, coefficient: torch.Tensor | None
    ) -> None:
        check_none_frozen(unit)
        self._optimizer = optimizer
        self._unit = unit
        self._states = states
        # Alive until the compute stream is ordered after the last kernel on the update stream that reads them: memory
        # of the compute stream that is freed before would be given to its next tensor (tests/test_offload_gpu.py).
        self._coefficient = coefficient
        self._reduced = None if GRADS in states else unit.grads.owned()
        reduced_dtype = states.storages[GRADS].dtype if self._reduced is None else self._reduced.dtype
        self.needs_room = reduced_dtype != torch.float32
        # The update may be issued after an LR scheduler has moved on.
        self._groups = [options_now(group) for group in optimizer.groups]
        offload_moments(optimizer.optimizer, unit)

    def __call__(self, bucket: Bucket, views: Views, room: torch.Tensor | None) -> NewMoments:
        with mark("update", self._unit.name):
            reduced = views[GRADS] if self._reduced is None else self._reduced[bucket.span.slice]
            grads = scaled(reduced, self._coefficient, room)
            state, pieces = self._optimizer.optimizer.state, self._unit.weights.pieces
            params: list[list[nn.Parameter]] = [[] for _ in self._groups]
            for piece in (pieces[number] for number in bucket.pieces):
                param, inside = piece.param, piece.span.shift(-bucket.span.start).slice
                params[piece.group].append(param)
                shape = param.shape
                if MASTER in views:
                    param.data = views[MASTER][inside].view(shape)
                param.grad = grads[inside].view(shape)
                for key in self._moments(param):
                    state[param][key] = views[key][inside].view(shape)
            self._optimizer.step(params, self._groups)
            self._optimizer.account_for(self._unit)
            return [moment for number in bucket.pieces for moment in self._put_back(number, views)]

    def done(self) -> None:
        if self._reduced is not None:
            self._unit.grads.clear()
        self._reduced = self._coefficient = None

    def _moments(self, param: nn.Parameter) -> list[str]:
        return per_element(self._optimizer.optimizer, param) if self._states.holds_moments else []

    def _put_back(self, number: int, views: Views) -> Iterator[tuple[str, Span, torch.Tensor]]:
        """Bind a piece and its state to where they rest; yields the moments that the optimizer made."""
        piece, states = self._unit.weights.pieces[number], self._states
        param, state = piece.param, self._optimizer.optimizer.state
        param.grad = None
        if MASTER in states:
            param.data = states.storages[MASTER].at_rest(piece.span, param.shape)
        for key in self._moments(param):
            value = state[param][key]
            state[param][key] = states.moment(key, value.dtype).at_rest(piece.span, value.shape)
            if key not in views or not shares_storage(value, views[key]):
                yield key, piece.span, value
