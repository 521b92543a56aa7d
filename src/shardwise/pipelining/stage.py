"""A stage of torch's pipeline schedules whose module is an engine.

A schedule runs micro-batches through stages and tells each stage when to compute and when gradients are complete. torch
knows how to run modules of DDP and FSDP there; `EngineStage` is the same for an engine:

| the schedule asks for             | the engine does                                                               |
|-----------------------------------|-------------------------------------------------------------------------------|
| a forward                         | its own; with `keep_gathered`, the first of a step gathers all weights        |
| a full backward                   | its own; replicated gradients are added up, sharded ones reduced              |
| gradients of the inputs alone     | `torch.autograd.grad`, which leaves nothing on the parameters                 |
| gradients of the weights, later   | the same, and `Engine.add_gradients`: reduced as after a backward             |
| REDUCE_GRAD, after the last one   | replicated gradients are reduced, once a step; kept weights are released      |

torch would assign weight gradients to `weight.grad`, which an engine does not look at before `step()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_weight

from shardwise.engine import Engine


class EngineStage(PipelineStage):
    """Stage `index` of `count`, computed by `engine`. Pass it to any schedule of `torch.distributed.pipelining`.

    `group` is the one of the pipeline. With `keep_gathered`, sharded weights stay gathered from the first forward of a
    step to its last backward, which sends them once a step instead of twice a micro-batch, and holds the whole stage.
    `examples` are torch's `input_args` and `output_args`.
    """

    def __init__(
        self,
        engine: Engine,
        index: int,
        count: int,
        group: dist.ProcessGroup,
        keep_gathered: bool = False,
        **examples: Any,
    ) -> None:
        super().__init__(engine, index, count, engine.comm.device, group=group, **examples)
        self.engine = engine
        self._keeps = keep_gathered
        self._is_kept = False

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        if self._keeps and not self._is_kept:
            self.engine.keep_gathered()
            self._is_kept = True
        return self.engine(*args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if backward_type == "weight":
            self._backward_weight(bwd_kwargs["param_groups"])
            return (), None
        with self.engine.no_sync():
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def _backward_weight(self, param_groups: list[dict[str, Any]]) -> None:
        named = self.engine.module.named_parameters()
        weights = {name: _Weight(param) for name, param in named if param.requires_grad}
        with self.engine.whole_weights():
            stage_backward_weight(_iterated(weights), param_groups)
        with self.engine.no_sync():
            self.engine.add_gradients({name: each.grad for name, each in weights.items() if each.grad is not None})

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """All gradients of the step are there. They are not scaled: the loss of a micro-batch is divided instead."""
        if grad_scale_factor != 1:
            raise RuntimeError(
                "the schedule divides gradients by the number of micro-batches, after the engine has reduced them: "
                "pass scale_grads=False to it, and divide the loss in its loss_fn"
            )
        self.engine.reduce_gradients()
        self._is_kept = False

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Nothing: see `perform_reduce_grad`."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """What torch before 2.13 sends to warm up, except to this rank itself, as in a V: Gloo cannot do that."""
        ops: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()  # not in torch 2.13
        return [op for op in ops if op.group_peer != self.group_rank]


class _Weight:
    """Stands for a parameter in torch's `stage_backward_weight`, which puts the gradient here instead of there."""

    requires_grad = True

    def __init__(self, param: nn.Parameter) -> None:
        self.grad_fn = get_gradient_edge(param).node
        self.grad: torch.Tensor | None = None


def _iterated(weights: dict[str, _Weight]) -> Iterator[Any]:
    return iter(weights.values())
