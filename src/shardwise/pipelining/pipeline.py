"""`shardwise.pipeline`: a model cut into stages, each an engine, run by a schedule of torch.

Every rank of a pipeline is given the same batch; ranks of different `dp` places get different ones, as under ZeRO. Each
stage runs the model's own forward on its copy (see `cut`), so a model computes from the batch on every stage what it
needs there: masks, positions, labels. Between stages only the hidden states are sent.

A checkpoint of a pipeline is one of the whole model, keyed by the names that parameters have in it. So any other number
of stages, another cut, a mesh without pp and a plain engine load it, and a pipeline loads theirs. A weight that the
first and the last stage both have is stored once, under its name on the first.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from shardwise import checkpoint
from shardwise.agreement.judge import name_ranks
from shardwise.checkpoint.checkpointable import ModelParts, persistent_buffers
from shardwise.checkpoint.storage import Location
from shardwise.comm.mesh import check_is_mesh
from shardwise.comm.model_group import Everyone, ModelGroup
from shardwise.config import Config
from shardwise.engine import Engine
from shardwise.engine.initialize import initialize
from shardwise.engine.report import Report
from shardwise.errors import ConfigError, DisagreementError
from shardwise.optim.optimizers import OptimizerFactory
from shardwise.partition.dtensors import local
from shardwise.partition.policy import DTYPES
from shardwise.partition.stored import stored_tensors
from shardwise.pipelining.cut import StageCut, cut, prune
from shardwise.pipelining.stage import EngineStage, ForwardPass, LossFn, StageCall
from shardwise.pipelining.tied import TiedWeights
from shardwise.tensors import map_tensors, tensors_in


def pipeline(
    model: nn.Module,
    mesh: Any,
    optimizer: OptimizerFactory | None = None,
    config: Any = "zero2",
    *,
    schedule: str = "1F1B",
    micro_batches: int = 8,
    split: Sequence[str] | None = None,
    loss_fn: LossFn | None = None,
    lr_scheduler: Callable[[Any], Any] | None = None,
    keep_gathered: bool = False,
) -> Pipeline:
    """Cut `model` over the axis `pp` of `mesh`, put each stage under ZeRO over its data-parallel axes, and return the
    pipeline. Parameters may be DTensors over the axis `tp`.

    `optimizer` and `lr_scheduler` are callables, as for `initialize`: every stage makes its own. `schedule` is one of
    torch's: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV. `split` names the
    first block of each stage but the first; without it stages have about the same number of parameters. The model's
    forward returns the loss, or an output with a `loss`; or `loss_fn(output, target)` makes it of a batch
    `(*inputs, target)`. The model's parameters are taken over: those of other ranks are freed.
    """
    if optimizer is not None and (isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer)):
        raise ConfigError(
            "a pipeline's stages have optimizers of their own: pass a callable that takes parameters, such as "
            "lambda params: torch.optim.AdamW(params, lr=1e-4)"
        )
    if loss_fn is not None and not callable(loss_fn):
        raise ConfigError(f"loss_fn is {loss_fn!r}: pass a callable, loss_fn(output, target)")
    loaded = Config.load(config)
    _check_config(loaded, micro_batches)
    group = _stage_group(mesh)
    _check_alike(schedule, micro_batches, split, keep_gathered)
    layout = PipelineLayout(schedule_class(schedule), group.size, micro_batches, split, keep_gathered)

    def make_engine(part: nn.Module) -> Engine:
        return initialize(part, optimizer, loaded, lr_scheduler, mesh)

    return assemble(model, layout, group, make_engine, loss_fn)


@dataclass(frozen=True)
class PipelineLayout:
    """A schedule of torch's over `ranks`, and how a model is cut for it; see `pipeline`."""

    kind: Any
    ranks: int
    micro_batches: int
    split: Sequence[str] | None = None
    keep_gathered: bool = False

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank of the pipeline."""
        if not issubclass(self.kind, PipelineScheduleMulti):
            return [rank]
        is_v = self.kind.__name__ in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
        return [rank, 2 * self.ranks - 1 - rank if is_v else self.ranks + rank]

    @property
    def owners(self) -> list[int]:
        """The rank of each stage."""
        owners = {stage: rank for rank in range(self.ranks) for stage in self.stages_of(rank)}
        return [owners[stage] for stage in sorted(owners)]

    def schedule(self, stages: Sequence[EngineStage]) -> Any:
        """The schedule of torch's that drives a rank's stages."""
        count = self.micro_batches
        try:
            return self.kind(
                list(stages) if issubclass(self.kind, PipelineScheduleMulti) else stages[0],
                count,
                loss_fn=lambda loss, _: loss.sum() / count,
                scale_grads=False,
            )
        except ValueError as error:
            name, stage_count = self.kind.__name__.removeprefix("Schedule"), len(self.owners)
            raise ConfigError(
                f"schedule {name} cannot run {count} micro-batches on {stage_count} stages: {error}"
            ) from None


def assemble(
    model: nn.Module,
    layout: PipelineLayout,
    group: ModelGroup,
    make_engine: Callable[[nn.Module], Engine],
    loss_fn: LossFn | None = None,
    make_stage: Callable[..., EngineStage] = EngineStage,
) -> Pipeline:
    """The pipeline of a rank of `group`: cut `model`, make an engine of each part of this rank, and drive them."""
    owners = layout.owners
    where = cut(model, len(owners), layout.split)
    names, tied = (*stored_tensors(model), *persistent_buffers(model)), TiedWeights.of(model, where)
    parts = {stage: prune(model, where, stage) for stage in layout.stages_of(group.rank)}
    _free_others(model, parts.values())
    calls = {stage: StageCall(part, loss_fn) for stage, part in parts.items()}
    engines = {stage: make_engine(part) for stage, part in parts.items()}
    pp = group.group
    try:
        driver = layout.schedule(
            [make_stage(each, stage, len(owners), pp, layout.keep_gathered) for stage, each in engines.items()]
        )
    except ConfigError:
        for engine in engines.values():
            engine.destroy()
        raise
    tied.attach(engines)
    own = list(engines.values())
    stored_as = {last: first for first, last in tied.names.items()}
    whole = ModelParts(own, Everyone(own[0].comm, group), group.size, names, stored_as)
    return Pipeline(driver, where, tied, whole, ForwardPass(engines, calls, owners, pp))


def _stage_group(mesh: Any) -> ModelGroup:
    """The axis pp of a mesh of all ranks, which stands before the others."""
    check_is_mesh(mesh)
    axes = tuple(mesh.mesh_dim_names or ())
    if "pp" not in axes or axes[0] != "pp" or len(axes) < 2:
        raise ConfigError(
            f"the axes of the mesh are {axes}: a pipeline needs pp first, and then any of dp_replicate, dp (or "
            "dp_shard) and tp, such as init_device_mesh(device, (2, 2, 2), mesh_dim_names=('pp', 'dp', 'tp'))"
        )
    if mesh.size() != dist.get_world_size():
        raise ConfigError(
            f"the mesh has {mesh.size()} of {dist.get_world_size()} ranks, and a pipeline is one of all ranks: start "
            "as many ranks as the mesh has, or make a mesh of all of them"
        )
    return ModelGroup.of(mesh["pp"])


def _check_alike(schedule: str, micro_batches: int, split: Sequence[str] | None, keep_gathered: bool) -> None:
    """Raise on all ranks if one of them was given another schedule. A collective of all ranks."""
    facts = {"schedule": schedule, "micro_batches": micro_batches, "split": split, "keep_gathered": keep_gathered}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, facts)
    for name in facts:
        ranks: dict[str, list[int]] = {}
        for rank, each in enumerate(everyone):
            ranks.setdefault(repr(each[name]), []).append(rank)
        if len(ranks) > 1:
            listed = ", ".join(f"{value} on {name_ranks(where)}" for value, where in ranks.items())
            raise DisagreementError(
                f"the ranks were started with different pipelines, {name}: {listed}. Pass the same arguments to "
                "shardwise.pipeline on all ranks"
            )


def _check_config(config: Config, micro_batches: int) -> None:
    if type(micro_batches) is not int or micro_batches < 1:
        raise ConfigError(f"micro_batches is {micro_batches!r}: give a whole number, at least 1")
    if config.precision.compute == "fp16":
        raise ConfigError("precision.compute is fp16, whose loss scale stages do not share: compute in bf16")
    if config.batch.accumulation > 1:
        raise ConfigError(
            f"batch.accumulation is {config.batch.accumulation}: a pipeline accumulates over its micro-batches, set "
            "micro_batches instead"
        )


def schedule_class(name: str) -> Any:
    try:
        kind = get_schedule_class(name)
    except (ValueError, AttributeError):
        kind = None
    if kind is None or inspect.isabstract(kind) or name.lower().startswith("pipelineschedule"):
        raise ConfigError(
            f"schedule is {name!r}: take GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, "
            "ZBVZeroBubble or DualPipeV"
        )
    return kind


def _free_others(model: nn.Module, parts: Any) -> None:
    own = {id(param) for part in parts for param in part.parameters()}
    for param in model.parameters():
        if id(param) not in own and not param.is_meta:
            values = local(param)
            values.data = values.data.new_empty(0)


class Pipeline:
    """A model in stages, of which this rank has `engines`, by the number of the stage."""

    def __init__(
        self, schedule: Any, where: StageCut, tied: TiedWeights, parts: ModelParts, forward_pass: ForwardPass
    ) -> None:
        self.engines = forward_pass.engines
        self.schedule = schedule
        self.where = where
        self.grad_norm: torch.Tensor | None = None
        self._calls = forward_pass.calls
        self._group = forward_pass.group
        self._tied = tied
        self._parts = parts
        self._pass = forward_pass
        self._saver = checkpoint.Saver()
        self._shapes: list[tuple[int, ...]] | None = None
        self._watch = parts.first.comm.watch

    @property
    def micro_batches(self) -> int:
        """How many micro-batches a step has."""
        return int(self.schedule._n_microbatches)

    @property
    def steps(self) -> int:
        return next(iter(self.engines.values())).steps

    def train_step(self, batch: Any) -> torch.Tensor:
        """Train on a batch, the same on all ranks of a pipeline; its mean loss, on all of them. A collective."""
        if self._parts.first.optimizer is None:
            raise ConfigError("the pipeline has no optimizer, so it only evaluates: pass one to shardwise.pipeline")
        parts = self._split(batch)
        with self._watched("step"):
            loss = self._run(parts)
            self.step()
        return loss

    def forward_backward(self, batch: Any) -> torch.Tensor:
        """Run all micro-batches of a batch through the schedule; the mean of their losses. A collective."""
        parts = self._split(batch)
        with self._watched("step"):
            return self._run(parts)

    def _watched(self, what: str = "other") -> contextlib.AbstractContextManager[None]:
        if self._watch is None:
            return contextlib.nullcontext()
        return self._watch.step() if what == "step" else self._watch.guard()

    def _run(self, parts: list[Any]) -> torch.Tensor:
        for call in self._calls.values():
            call.micro_batches = parts
        index, losses = torch.arange(self.micro_batches), list[torch.Tensor]()
        is_last = self.where.count - 1 in self.engines
        self.schedule.step(index=index, **({"target": index, "losses": losses} if is_last else {}))
        for call in self._calls.values():
            call.micro_batches = []
        loss = torch.zeros((), device=self._device)
        if is_last:
            loss += torch.stack([each.detach().float() for each in losses]).sum()
        dist.all_reduce(loss, group=self._group)
        return loss

    def evaluate(self, batch: Any) -> torch.Tensor:
        """The loss of a batch of any size, on all ranks of the pipeline; nothing is trained. A collective."""
        for engine in self.engines.values():
            engine.eval()
        try:
            with self._watched():
                return self._pass.loss(batch)
        finally:
            for engine in self.engines.values():
                engine.train()

    def step(self) -> None:
        """Clip by the norm over all stages, update, and step the schedules of learning rates. A collective."""
        self._tied.share(self.engines, self._group)
        norms = [engine.clip_grad_norm_(math.inf) for engine in self.engines.values()]
        self._tied.forget()
        total = torch.stack([norm.double().square() for norm in norms]).sum() - self._tied.counted_twice
        dist.all_reduce(total, group=self._group)
        self.grad_norm = total.sqrt().float()
        for engine in self.engines.values():
            engine.set_grad_norm(self.grad_norm)
            engine.step()

    def full_param(self, name: str) -> torch.Tensor | None:
        """A parameter's value, whole, on the ranks that hold its stage; None on others. A collective of these."""
        for engine in self.engines.values():
            if any(name in unit.names for unit in engine.units):
                return engine.full_param(name)
        return None

    # Checkpoints

    def save(
        self,
        dir: str | Path,
        tag: str | None = None,
        blocking: bool = True,
        state: dict[str, Any] | None = None,
        keep: int | None = None,
        frozen: bool = True,
    ) -> Location:
        """Write a checkpoint of the whole model into the folder `dir`, or into an object store; see `Engine.save`. A
        collective."""
        with self._watched():
            return self._saver.save(self._parts, dir, tag, blocking, state, keep, frozen)

    def finish_save(self) -> None:
        """Wait until an asynchronous save is complete; raise what went wrong. A collective."""
        with self._watched():
            self._saver.finish()

    def load(self, dir: str | Path, tag: str = "latest", fallback: bool = False, missing_ok: bool = False) -> Any:
        """Go on from a checkpoint, of any pipeline or engine that trained this model; see `Engine.load`. A
        collective."""
        self.finish_save()
        with self._watched():
            return checkpoint.load(self._parts, dir, tag, fallback, missing_ok)

    def export(
        self,
        dir: str | Path,
        dtype: str | None = None,
        max_file_bytes: int = checkpoint.MAX_FILE_BYTES,
        files_from: str | Path | None = None,
    ) -> None:
        """Write the whole model into the new folder `dir` as Hugging Face does; see `Engine.export`. A collective."""
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}: take one of {', '.join(DTYPES)}")
        wanted, beside = DTYPES[dtype] if dtype is not None else None, Path(files_from) if files_from else None
        with self._watched():
            checkpoint.export(self._parts, dir, wanted, max_file_bytes, files_from=beside)

    def report(self) -> dict[int, Report]:
        """The account of each stage of this rank."""
        return {place: engine.report() for place, engine in self.engines.items()}

    def destroy(self) -> None:
        """Take the engines off their models and free every buffer."""
        self._saver.leave()
        for engine in self.engines.values():
            engine.destroy()

    @property
    def _device(self) -> torch.device:
        return next(iter(self.engines.values())).comm.device

    def _split(self, batch: Any) -> list[Any]:
        count = self.micro_batches
        shapes = [tuple(tensor.shape) for tensor in tensors_in(batch)]
        sizes = {shape[0] if shape else 0 for shape in shapes}
        if len(sizes) != 1 or min(sizes) == 0 or min(sizes) % count:
            raise ConfigError(
                f"a batch of shapes {shapes} cannot be cut into {count} micro-batches: give tensors with equal numbers "
                "of rows, a multiple of micro_batches"
            )
        self._check_shapes(shapes)
        rows = sizes.pop() // count
        return [map_tensors(batch, partial(_rows, start=number * rows, count=rows)) for number in range(count)]

    def _check_shapes(self, shapes: list[tuple[int, ...]]) -> None:
        """Refuse other shapes than those of the first step: stages would receive what is sent into buffers of these."""
        if self._shapes is None:
            self._shapes = shapes
        if shapes != self._shapes:
            raise ConfigError(
                f"a batch of shapes {shapes}, and those before had {self._shapes}: what stages send each other has one "
                "shape, make all batches alike (pad them, drop the last)"
            )


def _rows(tensor: torch.Tensor, start: int, count: int) -> torch.Tensor:
    return tensor[start : start + count]
