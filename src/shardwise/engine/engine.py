"""The public object that ties the packages together: `Engine`, which `shardwise.initialize` returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from shardwise import checkpoint
from shardwise.checkpoint.checkpointable import ModelParts
from shardwise.checkpoint.storage import Location
from shardwise.comm import Comm
from shardwise.comm.mesh import RankMesh
from shardwise.config import Config
from shardwise.config.sections import Batch
from shardwise.engine import access
from shardwise.engine.activations import Recompute
from shardwise.engine.alike import OptionsCheck
from shardwise.engine.assembly import build_units, plan_units
from shardwise.engine.failures import PassFailures
from shardwise.engine.habits import InputWatch, SchedulerSteps, in_model_dtype, notice_division
from shardwise.engine.module_guard import ModelWatch, ModuleGuard
from shardwise.engine.replicas import ReplicaCheck
from shardwise.engine.report import Report, StepAccount, log_step
from shardwise.engine.residency import Budget, moments_each, open_offload, states_on_host
from shardwise.engine.root_call import RootCall
from shardwise.engine.step import StepGrads, StepUpdate
from shardwise.errors import GradientError, Notices
from shardwise.memory import Entry, Ledger
from shardwise.offload.pinned import HostMemory
from shardwise.optim import Updater
from shardwise.optim.frozen import check_frozen
from shardwise.optim.loss_scale import LossScaling
from shardwise.optim.optimizer_guard import OptimizerGuard, ShardMark
from shardwise.partition.policy import DTYPES
from shardwise.profiling import Clock
from shardwise.schedule import Prefetch, Schedule, ScheduleEvents
from shardwise.schedule.inference import generate_together
from shardwise.sizes import parse_bytes
from shardwise.unit import Unit


class Average(Protocol):
    """An average of the weights that is kept up with the steps, see `ema`."""

    key: str
    updates: int


class Engine(nn.Module):
    """A model under a placement. Call it as you would the model; then `backward(loss)` and `step()`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        config: Config,
        comm: Comm,
        host: HostMemory | None = None,
    ) -> None:
        super().__init__()
        self._notices = Notices(speaks=comm.everyone.rank == 0)
        self.module = model
        self.config = config = in_model_dtype(config, model, self._notices)
        self.optimizer = optimizer
        self.lr_scheduler: Any = None
        self.mesh: RankMesh | None = None
        self.grad_norm: torch.Tensor | None = None
        self.steps = 0
        self._is_destroyed = False
        self._saver = checkpoint.Saver()
        self._comm = comm
        self._lr_steps = SchedulerSteps(self._notices)
        self._inputs = InputWatch(comm, self._notices)
        self._options = OptionsCheck(comm, self._inputs)
        self._replicas = ReplicaCheck(comm, self._notices)
        self._scaling = LossScaling(config.precision, comm.device)
        self._ledger = Ledger.from_environment()
        self._expected_bytes: int | None = None
        budget = Budget(config.offload, comm, self._ledger)
        self._clock = Clock(comm.device if config.runtime.timers else None)
        plans = plan_units(model, optimizer, config, comm, budget)
        self._offload = open_offload(plans, moments_each(optimizer), config.offload, comm, self._ledger, host)
        self._account = StepAccount(comm, self._offload.streams, self._clock)
        self._units = build_units(plans, model, comm, self._offload, self._on_read)
        trainable = [unit for unit in self._units if unit.is_trainable]
        self._updater = Updater(optimizer, trainable, self._ledger) if optimizer is not None else None
        budget.begin(self._updater)
        self._step_grads = StepGrads(trainable, config, comm, self._notices)
        self._recompute = Recompute(model, self._units, config.checkpointing, self._offload)
        self._schedule = Schedule(model, self._units, Prefetch.of(config.runtime), self._clock, self._events())
        self._failures = PassFailures(config, self._units, comm, self._ledger)
        parts = (self._units, self._schedule, self._offload, budget, self._clock)
        self._step_update = StepUpdate(self._updater, *parts) if self._updater is not None else None
        self._update_hooks: list[Callable[[], None]] = []
        self._pause: str | None = None
        self.averages: list[Average] = []
        self._access = access.Access(model, self._units)
        self._guard = ModuleGuard(model, self.zero_grad)
        self._optimizer_guard = self._guarded(optimizer) if optimizer is not None else None
        self._watch = ModelWatch(model, self._units)
        self._root_call = RootCall(model, config.precision, comm.device, self._schedule, self._forwarding)

    # The loop

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, in the configured precision: the same as `engine.module(...)`."""
        self._check_alive("forward")
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, scale: bool = True, retain_graph: bool = False) -> None:
        """Gradients of `loss`, divided by the number of micro-batches (unless `scale` is False), and reduced.

        With `retain_graph`, the graph of the loss serves another backward before `step()`. A plain `loss.backward()`
        does the same without the division; not in fp16, where the loss has to be scaled.
        """
        self._check_alive("backward")
        count = self.config.batch.accumulation
        if scale and count > 1:
            notice_division(loss, count, self._notices)
            loss = loss * (1.0 / count)
        loss = self._scaling.scaled(loss)
        if self._schedule.backward.is_stale:
            self.zero_grad()
        self._schedule.backward.begin()
        try:
            with self._failures.during("backward"):
                loss.backward(retain_graph=retain_graph)
                self._schedule.backward.end()
        except BaseException:
            self.zero_grad()
            self._watch.examine()  # a better reason than torch's, if a parameter was resized
            raise

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as a plain `.backward()` needs it: in fp16 times the loss scale, else as it is.

        For options that `backward` does not have: `engine.scale(loss).backward(inputs=...)`.
        """
        return self._scaling.noted(self._scaling.scaled(loss))

    def step(self, closure: None = None) -> None:
        """At the accumulation boundary: clip, update, and start the gathers of new weights. Otherwise only count."""
        self._check_alive("step")
        if closure is not None:
            raise TypeError(
                "engine.step() takes no closure: an optimizer that evaluates the model several times in a step "
                "cannot work on shards; call engine(...), engine.backward(loss) and engine.step() in turn"
            )
        if self._step_update is None:
            raise RuntimeError("this engine has no optimizer: pass one to shardwise.initialize")
        self._check_not_paused("engine.step() cannot update")
        if self._schedule.backward.is_stale:
            self.zero_grad()
        elif not self.is_boundary:
            self._step_grads.next_micro_batch()
        else:
            with self._step_grads.updating(), self._failures.during("step"):
                self._update_weights(self._step_update)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients accumulated so far and start a new accumulation. `step()` does so itself.

        `optimizer.zero_grad()` and `model.zero_grad()` do the same. The backward of a forward before it still works.
        """
        self._schedule.backward.drop_gradients()
        self._step_grads.dropped()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients to a norm of at most `max_norm` in this step's update; returns the norm before clipping.

        Call it between the last backward of a step and `step()`, on all ranks. The norm is that of the averaged
        gradients of the whole model, after the hooks of `register_grad_hook`, and in fp16 without the loss scale. If
        `gradients.clip_norm` is smaller, it applies.

        >>> import torch, shardwise
        >>> model = torch.nn.Linear(4, 1)
        >>> engine = shardwise.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero2")
        >>> engine.backward(engine(torch.ones(2, 4)).mean())
        >>> norm = engine.clip_grad_norm_(1.0)
        >>> engine.step()
        """
        if norm_type != 2.0:
            raise ValueError(f"norm_type is {norm_type}: engine.clip_grad_norm_() has the 2-norm alone, leave it out")
        if not self.is_boundary:
            raise GradientError(
                "engine.clip_grad_norm_() before the last micro-batch of a step, when gradients are not complete: call "
                "it only if engine.is_boundary"
            )
        with self._failures.during("clipping"):
            self._step_grads.let_go(self.zero_grad)
            if not self._step_grads.exist:
                raise GradientError(
                    "engine.clip_grad_norm_() finds no gradients: call it after engine.backward(loss) and before "
                    "engine.step()"
                )
            self.grad_norm = self._step_grads.clip(self._schedule, self._clock, self._scaling.scale, max_norm)
        return self.grad_norm

    @property
    def loss_scale(self) -> float:
        """The factor on the next loss; 1.0 except in fp16. Waits for the device."""
        scale = self._scaling.scale
        return scale.item() if scale is not None else 1.0

    @property
    def was_skipped(self) -> bool:
        """Whether the last update was skipped because gradients overflowed in fp16. Waits for the device."""
        self._learn_outcome()
        return self._scaling.was_skipped

    @property
    def skipped_steps(self) -> int:
        """How many of `steps` were skipped. Waits for the device."""
        self._learn_outcome()
        return self._scaling.skipped_steps

    @property
    def is_boundary(self) -> bool:
        """Whether the next `step()` updates."""
        return self._step_grads.is_boundary

    def set_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the next `step()` updates; with None, the counter of micro-batches decides again."""
        self._step_grads.boundary = is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward adds to the local gradients and sends nothing, where gradients are replicated."""
        grads = self._step_grads
        grads.syncs, before = False, grads.syncs
        try:
            yield
        finally:
            grads.syncs = before

    # Passes that only compute

    @contextlib.contextmanager
    def inference(self, device_memory: int | str | None = None) -> Iterator[None]:
        """Within it, passes only compute, and sharded weights stay gathered from one to the next: as many units as fit
        `device_memory` (bytes, or a text such as "4GiB"), by default three quarters of what is free. A collective.

        All ranks call the model equally often inside, as `generate` does.
        """
        budget = parse_bytes(device_memory) if device_memory is not None else None
        with (
            self.paused("engine.inference() keeps the weights as they are: leave its `with` block first"),
            self._schedule.inference.keeping_gathered(self._comm, budget),
        ):
            yield

    @contextlib.contextmanager
    def offloaded(self) -> Iterator[None]:
        """Within it, between steps, masters, optimizer states and sharded weights rest in host memory: another program
        may use the device. Forwards work, as slow as the host's copies are. On all ranks.

        >>> import torch, shardwise
        >>> model = torch.nn.Linear(8, 8)
        >>> config = {"preset": "zero3", "precision": {"compute": "bf16"}}
        >>> engine = shardwise.initialize(model, torch.optim.AdamW(model.parameters()), config)
        >>> with engine.offloaded():
        ...     sorted(engine.report().tier_bytes)
        ['host']
        """
        self._check_alive("offloaded")
        self._check_not_paused("engine.offloaded() cannot move what other code reads")
        if not self.is_at_rest:
            raise RuntimeError(
                "engine.offloaded() in the middle of a step, whose gradients would stay on the device: enter it after "
                "an engine.step() that updates, or after engine.zero_grad()"
            )
        self._schedule.gathers.drop()
        self._offload.pool.trim()
        with (
            self.paused("engine.offloaded() has moved the states to the host: leave its `with` block first"),
            states_on_host(self._units, self.optimizer, self._ledger, self._offload.host),
        ):
            yield

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's `generate` within `inference()`. Ranks that are done early keep calling until all are."""
        with self.inference():
            return generate_together(self.module.generate, self._comm.world_size, *args, **kwargs)  # type: ignore[arg-type]  # nn.Module.__getattr__

    # For drivers that run the micro-batches of a step themselves, see `pipelining`

    def add_gradients(self, grads: Mapping[str, torch.Tensor]) -> None:
        """Add gradients that `torch.autograd.grad` has returned, by parameter, as `backward` would. A collective."""
        if self._scaling.scaler is not None:
            raise RuntimeError("in fp16 the loss has to be scaled: call engine.backward(loss), not torch.autograd.grad")
        with self._failures.during("backward"):
            self._schedule.backward.add_gradients(grads)

    def reduce_gradients(self) -> None:
        """Reduce the gradients that `step()` would reduce, and release what `keep_gathered` kept. A collective."""
        with self._failures.during("reduction"):
            self._step_grads.reduce(self._schedule, self.zero_grad)
            self._schedule.gathers.unlock_all()

    def keep_gathered(self) -> None:
        """Gather sharded weights for all passes up to `reduce_gradients` or `step()`. A collective."""
        self._schedule.gathers.lock_all()

    def whole_weights(self) -> contextlib.AbstractContextManager[None]:
        """Within it, outside of forward and backward, sharded weights are gathered. A collective."""
        return self._schedule.gathers.all_gathered()

    def set_batch(self, batch: Batch) -> None:
        """Between steps: change the number of micro-batches of a step."""
        self.config = self.config.with_sections(batch=batch)
        self._step_grads.micro_batches = batch.accumulation

    def set_grad_norm(self, norm: torch.Tensor) -> None:
        """After `clip_grad_norm_`: clip by the norm of a larger model, of which this engine has a part."""
        self._step_grads.set_norm(norm)
        self.grad_norm = norm

    # A look inside

    def full_param(self, name: str) -> torch.Tensor:
        """A parameter's current value, whole, in the precision that is updated. A collective."""
        self._check_alive("full_param")
        return access.full_param(self._units, name)

    def full_grad(self, name: str) -> torch.Tensor:
        """A parameter's reduced gradient, whole; between the last backward of a step and `step()`. A collective."""
        self._check_alive("full_grad")
        return access.full_grad(self._units, name)

    def full_state(self, name: str) -> dict[str, torch.Tensor]:
        """A parameter's optimizer state, whole. A collective."""
        self._check_alive("full_state")
        return access.full_state(self._units, self.optimizer, name)

    def register_grad_hook(self, hook: Callable[[str, torch.Tensor], None]) -> None:
        """Call `hook(unit_name, shard)` on each reduced shard of gradients, before `step()`; it may edit in place."""
        self._step_grads.hooks.append(hook)

    def register_update_hook(self, hook: Callable[[], None]) -> None:
        """Call `hook()` after each update, when this rank's master copies are up to date."""
        self._update_hooks.append(hook)

    @contextlib.contextmanager
    def paused(self, reason: str) -> Iterator[None]:
        """Within it, `step()`, `save()` and `load()` raise with `reason`."""
        self._pause, before = reason, self._pause
        try:
            yield
        finally:
            self._pause = before

    def _check_not_paused(self, refusal: str) -> None:
        if self._pause is not None:
            raise RuntimeError(f"{refusal}: {self._pause}")

    def _check_alive(self, call: str) -> None:
        if self._is_destroyed:
            raise RuntimeError(f"engine.{call}() after engine.destroy(), which has freed all values: make a new engine")

    def account(self, entry: Entry, size_bytes: int) -> None:
        """Enter what an extension holds into the ledger."""
        self._ledger.set_bytes(entry, size_bytes)

    def report(self) -> Report:
        """Memory by kind and tier, bytes sent by kind, time by phase."""
        return Report.of(self._ledger, self._account, self._comm.device, self.steps, self._expected_bytes)

    def expect(self, peak_bytes: int) -> None:
        """Set the peak that `report()` shows as predicted for this rank, by a plan or `shardwise.foresee`."""
        self._expected_bytes = peak_bytes

    @property
    def comm(self) -> Comm:
        return self._comm

    @property
    def units(self) -> tuple[Unit, ...]:
        return tuple(self._units)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's state_dict with whole values. A collective where weights are sharded."""
        self._check_alive("state_dict")
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load whole values into the model, master copies included. A collective. `assign` is refused."""
        self._check_alive("load_state_dict")
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    # Checkpoints

    def save(
        self,
        dir: str | Path,
        tag: str | None = None,
        blocking: bool = True,
        state: dict[str, Any] | None = None,
        keep: int | None = None,
        frozen: bool = True,
        midway: bool = False,
    ) -> Location:
        """Write a checkpoint into the folder `dir`, which appears there complete or not at all. A collective.

        `dir` may be the address of an object store, such as `s3://bucket/folder`.

        It holds everything that training continues from: weights, master copies, optimizer state, counters, schedules,
        random number generators, and rank 0's `state`, a dictionary of numbers, strings, lists and tensors. `tag`
        names it (`step-100`); with `keep`, only that many of the newest are kept. With `frozen` False, the values of
        frozen parameters are left out, and a load keeps those that the model has. With `midway`, a save between the
        micro-batches of a step leaves their gradients out; else it is refused. With `blocking` False, training
        continues as soon as everything is copied to host memory; the next `save` or `load`, or `finish_save`, waits
        for it and raises what went wrong.
        """
        self._check_alive("save")
        self._check_not_paused("engine.save() would take other weights than those that train")
        return self._saver.save(ModelParts.of(self), dir, tag, blocking, state, keep, frozen, midway)

    def finish_save(self) -> None:
        """Wait until an asynchronous save is complete; raise what went wrong. A collective."""
        self._saver.finish()

    def load(self, dir: str | Path, tag: str = "latest", fallback: bool = False, missing_ok: bool = False) -> Any:
        """Continue from a checkpoint in `dir`, saved at any world size and placement; the user's state. A collective.

        With `fallback`, if one of its files is damaged, the newest undamaged checkpoint is loaded instead. If a load
        fails midway, the engine's values are part old, part new: load another one, or stop. With `missing_ok`, nothing
        happens if `dir` holds no checkpoint at all.
        """
        self._check_alive("load")
        self._check_not_paused("engine.load() cannot replace the weights")
        self.finish_save()
        return checkpoint.load(ModelParts.of(self), dir, tag, fallback, missing_ok)

    def export(
        self,
        dir: str | Path,
        dtype: str | None = None,
        max_file_bytes: int = checkpoint.MAX_FILE_BYTES,
        merged: bool = False,
        files_from: str | Path | None = None,
    ) -> None:
        """Write the weights into the new folder `dir` as Hugging Face does: safetensors, with an index if several
        files are needed, and the model's configurations and tokenizer files. A collective.

        `dtype` is fp32, bf16 or fp16; without it, that of the weights that compute. A tied weight is written once,
        under its first name. Names are those of the model inside torch.compile and other wrappers. Of a model with
        adapters of PEFT, the adapters are written as PEFT does; with `merged`, the whole model with its adapters
        merged. Files that the model does not hold are copied from the folder `files_from` or, without it, from the
        one that the model was loaded from. Each rank writes what it owns straight into place: nothing is gathered but
        adapters, and with `merged` the units that have some, one after the other.
        """
        self._check_alive("export")
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}: take one of {', '.join(DTYPES)}")
        wanted, folder = DTYPES[dtype] if dtype is not None else None, Path(files_from) if files_from else None
        checkpoint.export(ModelParts.of(self), dir, wanted, max_file_bytes, merged, folder)

    @property
    def is_at_rest(self) -> bool:
        """Whether no gradients are accumulated: the moments at which `save` works."""
        trainable = (unit for unit in self._units if unit.is_trainable)
        return not self._step_grads.is_midway and not any(unit.grads.has_gradients for unit in trainable)

    def progress(self) -> dict[str, Any]:
        """The counters of training and the loss scale. Waits for the device."""
        self._learn_outcome()
        averages = {average.key: average.updates for average in self.averages}
        return {"steps": self.steps, **self._scaling.state_dict(), "averages": averages}

    def set_progress(self, progress: Mapping[str, Any]) -> None:
        """Continue counting from what `progress` gave."""
        self.steps = progress["steps"]
        self._scaling.load_state_dict(progress)
        for average in self.averages:
            average.updates = progress.get("averages", {}).get(average.key, 0)
        if self._updater is not None:
            self._updater.account()

    def destroy(self) -> None:
        """Remove the engine from the model and free every buffer; the model's parameters are then empty."""
        if self._is_destroyed:
            return
        self._is_destroyed = True
        self._saver.leave()
        self._comm.begin_close()
        self._schedule.remove()
        self._recompute.remove()
        self._access.remove()
        self._root_call.remove()
        self._guard.remove()
        for unit in self._units:
            unit.free()
        if self._updater is not None:
            self._updater.close()
        if self._optimizer_guard is not None:
            self._optimizer_guard.remove()
        self._offload.close()
        self._comm.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an engine cannot be copied or pickled: copy.deepcopy(engine.module) gives a plain model with whole "
            "values, on all ranks together, and engine.state_dict() its weights alone"
        )

    if not TYPE_CHECKING:  # mypy would otherwise take an Engine for any protocol, also where it lacks a member

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                if name == "module":
                    raise
                return getattr(self.module, name)

    # Inside

    def _guarded(self, optimizer: torch.optim.Optimizer) -> OptimizerGuard:
        comm, cut = self._comm, self._units[0].weights.policy.optim_cut
        numel = sum(unit.weights.owned.numel for unit in self._units)
        place = comm.shape.part_index(cut, comm.rank), comm.model_group.rank
        mark = ShardMark(*place, comm.shape.parts(cut), comm.model_group.size, numel)
        return OptimizerGuard(optimizer, self.zero_grad, mark)

    def _events(self) -> ScheduleEvents:
        return ScheduleEvents(
            reduces=lambda: self._step_grads.are_reduced,
            reduced=self._on_reduced,
            check_plain_backward=self._scaling.check_plain_backward,
            begins=self._on_begin_backward,
            ended=self._step_grads.hold,
            broken_backward=self.zero_grad,
            last_unit=self._offload.pool.trim,
        )

    def _on_read(self, unit: Unit) -> bool:
        return self._schedule.forward.read(unit)

    def _on_begin_backward(self) -> None:
        self._step_grads.check_may_grow()
        self._step_grads.let_go(self.zero_grad)

    def _on_reduced(self, unit: Unit) -> None:
        """Before an update: prefetch its states, and gather final gradients for a replicated optimizer."""
        if not self._step_grads.is_boundary:
            return
        if self._step_update is not None:
            self._step_update.prefetch()
        if self._step_grads.are_gathered_early:
            unit.grads.start_gather()

    @contextlib.contextmanager
    def _forwarding(self, *inputs: Any) -> Iterator[None]:
        """Around a forward of the model. Without gradients it is an evaluation."""
        with self._failures.during("forward"):
            if torch.is_grad_enabled():
                self._inputs.note(*inputs)
                yield
            else:
                with self._account.evaluation():
                    yield

    def _learn_outcome(self) -> None:
        """Once the host knows how the last step in fp16 ended: count it, and step the LR scheduler."""
        if self._scaling.learn() and self.lr_scheduler is not None:
            self._lr_steps.step(self.lr_scheduler)

    def _update_weights(self, update: StepUpdate) -> None:
        check_frozen(self._units)
        self._watch.check()
        if self._step_grads.exist:
            update.call_pre_hooks()
        self._step_grads.let_go(self.zero_grad)
        if not self._step_grads.exist:
            return
        self._learn_outcome()
        self._scaling.check_not_exhausted(self.zero_grad)
        self._options.check(update.optimizer)
        clip = self._step_grads.finish(self._schedule, self._clock, self._scaling.scale)
        self._replicas.check(self._units)
        self.grad_norm = clip.grad_norm
        update.apply(clip, self.zero_grad)
        for hook in self._update_hooks:
            hook()
        self._step_grads.used()
        self.steps += 1
        self._account.steps += 1
        update.spend_budget()
        if clip.overflow is not None:
            self._scaling.note(clip.overflow)
        elif self.lr_scheduler is not None:
            self._lr_steps.step(self.lr_scheduler)
        every = self.config.runtime.steps_per_print
        if every and self.steps % every == 0 and self._comm.everyone.rank == 0:
            log_step(self.steps, update.optimizer, self.grad_norm)
