"""The pipeline in a dry run: the stages of one of its ranks, driven by torch's schedule in a group that sends nothing.

It also has the bubble of a schedule: the share of a step in which a rank waits for others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import schedules

from shardwise.comm.model_group import ModelGroup
from shardwise.dry_run.comm import PipelineRank
from shardwise.dry_run.kernels import replacing
from shardwise.engine import Engine
from shardwise.pipelining.cut import find_blocks
from shardwise.pipelining.pipeline import PipelineLayout, assemble, schedule_class
from shardwise.pipelining.stage import EngineStage
from shardwise.tensors import tensors_in

_DURATIONS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


class DryStage(EngineStage):
    """A stage that knows what it will receive, and asks no other rank."""

    def __init__(self, *args: Any, hidden: torch.Tensor) -> None:
        _, index, count, *_ = args
        received = () if index == 0 else (hidden,)
        sent = (torch.zeros(1),) if index == count - 1 else (hidden,)
        super().__init__(*args, input_args=received, output_args=sent)

    def _warmup_forward_vote(self, *args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(item=lambda: 1)  # all ranks know the shapes

    _warmup_backward_result = _warmup_forward_vote


def _transfers(ops: Sequence[Any], desc: str | None = None) -> list[Any]:
    """Stand-ins for transfers between stages: they refer to the tensors until the schedule drops them, as Gloo's do."""
    return [SimpleNamespace(tensor=op.tensor, wait=lambda: None) for op in ops]


class _Reached(Exception):
    """Leaves a model's forward after its first block."""


class DryPipeline:
    """The stages of one rank. `sent_bytes` is what it sends to those before and after in a step."""

    def __init__(
        self,
        model: nn.Module,
        at: PipelineRank,
        group: ModelGroup,
        make_engine: Callable[[nn.Module], Engine],
        example: tuple[Mapping[str, Any], torch.dtype],
    ) -> None:
        hidden = _hidden_states(model, *example)
        make_stage = partial(DryStage, hidden=hidden.requires_grad_())
        kind = schedule_class(at.schedule)
        layout = PipelineLayout(kind, at.pp, at.micro_batches, keep_gathered=at.keep_gathered)
        self._pipe = assemble(model, layout, group, make_engine, None, make_stage)
        for call in self._pipe._calls.values():
            call.number_of = lambda index: 0  # fake tensors have no values, and all micro-batches are alike
        self.engines = list(self._pipe.engines.values())
        owners, last = layout.owners, len(layout.owners) - 1
        neighbours = [(stage, stage + step) for stage in layout.stages_of(at.rank) for step in (1, -1)]
        sends = sum(0 <= other <= last and owners[other] != at.rank for _, other in neighbours)
        self._count = at.micro_batches
        self.sent_bytes = sends * hidden.nbytes * self._count

    def step(self, batches: Iterator[dict[str, Any]]) -> None:
        """A step, on the next micro-batches."""
        with replacing({"_batch_p2p": _transfers}, of=schedules):
            self._pipe._run([next(batches) for _ in range(self._count)])
        self._pipe.step()


def _hidden_states(model: nn.Module, batch: Mapping[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """What the first block gives for a batch, in the precision that computes."""
    found: list[torch.Tensor] = []

    def capture(module: nn.Module, args: Any, output: Any) -> None:
        found.append(tensors_in(output)[0])
        raise _Reached

    handle = model.get_submodule(find_blocks(model)[0]).register_forward_hook(capture)
    try:
        with torch.no_grad(), contextlib.suppress(_Reached):
            model(**batch)
    finally:
        handle.remove()
    return found[0].detach().to(dtype).clone()


def bubble(schedule: str, pp: int, micro_batches: int) -> float:
    """The share of a step in which the ranks of a pipeline wait, if a backward takes twice as long as a forward.

    >>> round(bubble("1F1B", 4, 8), 3), round(bubble("GPipe", 4, 8), 3)
    (0.273, 0.273)
    """
    layout = PipelineLayout(schedule_class(schedule), pp, micro_batches)
    count = len(layout.owners)
    stages: list[Any] = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=count,
            group_size=pp,
            group_rank=0,
            is_first=stage == 0,
            is_last=stage == count - 1,
            submod=nn.Identity(),
        )
        for stage in layout.stages_of(0)
    ]
    orders = layout.schedule(stages).pipeline_order
    return _waiting([_works(orders[rank]) for rank in range(pp)], count)


def _works(order: Sequence[Any]) -> list[tuple[int, str, int]]:
    """The stage, the kind (F, B, I or W) and the micro-batch of what a rank computes, in its order."""
    actions = [each for action in order if action is not None for each in action.sub_actions or (action,)]
    found = [(each.stage_index, each.computation_type.value, each.microbatch_index) for each in actions]
    # The last rank of torch's 1F1B counts its forwards from 1 on.
    firsts = {stage: min(n for at, kind, n in found if (at, kind) == (stage, "F")) for stage, _, _ in found}
    return [(at, kind, n - firsts[at] if kind == "F" else n) for at, kind, n in found if kind in _DURATIONS]


def _waiting(works: Sequence[Sequence[tuple[int, str, int]]], count: int) -> float:
    """The share of time in which ranks wait that do `works` in their order, each after what it depends on."""
    ends: dict[tuple[int, str, int], float] = {}
    left, clocks = [list(reversed(each)) for each in works], [0.0] * len(works)
    while any(left):
        before = len(ends)
        for rank, queue in enumerate(left):
            while queue and (start := _ready(ends, queue[-1], count)) is not None:
                stage, kind, number = queue.pop()
                clocks[rank] = max(clocks[rank], start) + _DURATIONS[kind]
                ends[stage, "B" if kind == "I" else kind, number] = clocks[rank]
        assert len(ends) > before, "the ranks wait for each other"
    busy = sum(_DURATIONS[kind] for each in works for _, kind, _ in each)
    return 1 - busy / (max(clocks) * len(works))


def _ready(ends: Mapping[tuple[int, str, int], float], work: tuple[int, str, int], count: int) -> float | None:
    """When what a work depends on has ended; None if it has not."""
    stage, kind, number = work
    if kind == "F":
        return ends.get((stage - 1, "F", number)) if stage else 0.0
    if kind == "W":
        return ends.get((stage, "B", number))
    return ends.get((stage + 1, "B", number) if stage < count - 1 else (stage, "F", number))
