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

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_weight

from shardwise.engine import Engine
from shardwise.errors import ConfigError
from shardwise.pipelining.absent import check_present
from shardwise.pipelining.cut import PartBefore, StageEnd
from shardwise.tensors import kept_by, tensors_in

LossFn = Callable[[Any, Any], torch.Tensor]


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


class StageCall:
    """Replaces the forward of a stage's model: `forward(*received, index)` runs micro-batch number `index`."""

    def __init__(self, part: nn.Module, loss_fn: LossFn | None) -> None:
        self.micro_batches: list[Any] = []
        self.number_of: Callable[[torch.Tensor], int] = int
        self._loss_fn = loss_fn
        before = (module for module in part.modules() if isinstance(module, PartBefore))
        self._reception = next((module.reception for module in before), None)
        own = self._reception.blocks.values() if self._reception is not None else ()
        self._handles = [block.register_forward_hook(self._note_returned) for block in own]
        self._returned = set[Any]()
        self._options = {"use_cache": False} if "use_cache" in inspect.signature(part.forward).parameters else {}
        vars(part)["forward"] = partial(self._run, part.forward)

    def _run(self, forward: Callable[..., Any], *received: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        if self._reception is not None:
            (self._reception.values,) = received
        batch = self.micro_batches[self.number_of(index)]
        try:
            return self._loss(forward, batch)
        except StageEnd as end:
            return end.value
        finally:
            if self._reception is not None:
                self._reception.clear()
            if torch.is_grad_enabled():
                self._forget_returned()

    def _loss(self, forward: Callable[..., Any], batch: Any) -> torch.Tensor:
        if isinstance(batch, Mapping):
            output, target = forward(**{**self._options, **batch}), batch
        elif self._loss_fn is not None:
            if not isinstance(batch, (tuple, list)) or len(batch) < 2:
                raise ConfigError(
                    f"with loss_fn a batch is (*inputs, target), and this one is a {type(batch).__name__}: pass a "
                    "tuple, or leave loss_fn out if the model returns the loss"
                )
            output, target = forward(*batch[:-1], **self._options), batch[-1]
        else:
            args = batch if isinstance(batch, (tuple, list)) else (batch,)
            output, target = forward(*args, **self._options), None
        loss = self._loss_fn(output, target) if self._loss_fn is not None else getattr(output, "loss", output)
        check_present(loss, lambda: "the loss is computed")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            if self._loss_fn is None:
                raise ConfigError(f"the model returned {what} and no loss: pass loss_fn=, or batches with labels")
            raise ConfigError(f"loss_fn returned {what}, and a loss is one number: return the mean")
        self._check_kept(loss)
        return loss.reshape(1)

    def _note_returned(self, block: nn.Module, args: Any, output: Any) -> None:
        self._returned.update(each.grad_fn for each in tensors_in(output))

    def _forget_returned(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._returned = set()

    def _check_kept(self, loss: torch.Tensor) -> None:
        """In the first training forward, refuse a loss with parts that blocks keep in attributes, as routers do: those
        of other stages are missing. What a block keeps and uses itself comes before what it returns, and is no such
        part.
        """
        if self._reception is None or not self._handles or loss.grad_fn is None:
            return
        kept: dict[Any, str] = {}
        for block, module in self._reception.blocks.items():
            scalars = (each for each in kept_by(module.modules()) if each.numel() == 1 and each.grad_fn is not None)
            kept |= {each.grad_fn: block for each in scalars}
        seen, found = {*self._returned}, [loss.grad_fn]
        while kept and found:
            node = found.pop()
            if node in kept:
                raise ConfigError(
                    f"the loss has a part that block {kept[node]!r} keeps in an attribute, and the last stage has "
                    "those of its own blocks alone: leave it out, or use ZeRO alone, shardwise.initialize(model, "
                    "optimizer, 'zero3')"
                )
            if node not in seen:
                seen.add(node)
                found += [each for each, _ in node.next_functions if each is not None]


class ForwardPass:
    """Runs batches through the stages of a pipeline; `owners` has the rank of each stage in `group`.

    Unlike a schedule it takes batches of any shape: a stage sends the shape with the values.
    """

    def __init__(
        self,
        engines: Mapping[int, Engine],
        calls: Mapping[int, StageCall],
        owners: Sequence[int],
        group: dist.ProcessGroup,
    ) -> None:
        self.engines = engines
        self.calls = calls
        self.group = group
        self._owners = owners
        self._rank = dist.get_rank(group)

    @torch.no_grad()
    def loss(self, batch: Any) -> torch.Tensor:
        """The loss of a batch, on all ranks of the pipeline. A collective."""
        hidden: torch.Tensor | None = None
        for stage, owner in enumerate(self._owners):
            if owner == self._rank:
                received = () if hidden is None else (hidden,)
                self.calls[stage].micro_batches = [batch]
                hidden = self.engines[stage](*received, index=torch.zeros(1, dtype=torch.long))
                self.calls[stage].micro_batches = []
            if stage + 1 < len(self._owners):
                hidden = self._hand_on(hidden, owner, self._owners[stage + 1])
        last = self._owners[-1]
        loss = hidden.float().reshape(()) if hidden is not None and last == self._rank else self._blank((), torch.float)
        dist.broadcast(loss, group=self.group, group_src=last)
        return loss

    def _hand_on(self, hidden: torch.Tensor | None, source: int, target: int) -> torch.Tensor | None:
        if source == target or self._rank not in (source, target):
            return hidden
        if self._rank == source:
            assert hidden is not None
            dist.send_object_list([(tuple(hidden.shape), hidden.dtype)], group=self.group, group_dst=target)
            dist.send(hidden.contiguous(), group=self.group, group_dst=target)
            return None
        told: list[Any] = [None]
        dist.recv_object_list(told, group=self.group, group_src=source)
        hidden = self._blank(*told[0])
        dist.recv(hidden, group=self.group, group_src=source)
        return hidden

    def _blank(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=next(iter(self.engines.values())).comm.device)
