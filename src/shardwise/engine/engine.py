"""The public object that ties the layers together: `shardwise.initialize` and `Engine`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise import checkpoint
from shardwise.comm.comm import Comm
from shardwise.config import Config
from shardwise.engine import access, oom
from shardwise.engine.activations import ActivationStore
from shardwise.engine.assembly import assemble
from shardwise.engine.module_guard import ModuleGuard
from shardwise.engine.recompute import Recompute
from shardwise.engine.report import Report
from shardwise.engine.residency import Budget
from shardwise.memory.ledger import Entry, Ledger
from shardwise.offload.context import OffloadContext
from shardwise.offload.pinned import HostMemory
from shardwise.offload.unit_states import UnitStates
from shardwise.optim import clipping
from shardwise.optim.frozen import check_none_thawed
from shardwise.optim.loss_scale import Outcome, Scaler
from shardwise.optim.updater import Updater
from shardwise.partition.policy import DTYPES
from shardwise.profiling import Clock
from shardwise.schedule.order import Ahead
from shardwise.schedule.schedule import Schedule
from shardwise.tensors import map_tensors
from shardwise.unit.unit import Unit

if TYPE_CHECKING:
    from shardwise.engine.ema import Ema

_LOG = logging.getLogger("shardwise")


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
        self.module = model
        self.config = config
        self.optimizer = optimizer
        self.lr_scheduler: Any = None
        self.grad_norm: torch.Tensor | None = None
        self.steps = 0
        self._skipped_steps = 0
        self._micro_step = 0
        self._boundary: bool | None = None
        self._syncs = True
        self._is_destroyed = False
        self._saving: checkpoint.Background | None = None
        self._comm = comm
        self._scaler = Scaler.of(config.precision, comm.device)
        self._outcome: Outcome | None = None
        self._was_skipped = False
        self._is_exhausted = False
        self._ledger = Ledger.from_environment()
        self._expected_bytes: int | None = None
        self._offload = OffloadContext(comm.device, self._ledger, config.offload, host)
        self._budget = Budget(config.offload, comm, self._ledger)
        self._clock = Clock(comm.device if config.runtime.timers else None)
        self._units = assemble(model, optimizer, config, comm, self._offload, self._budget)
        trainable = [unit for unit in self._units if unit.grads is not None]
        self._updater = Updater(optimizer, trainable, self._ledger) if optimizer is not None else None
        self._budget.begin(self._updater)
        self._is_offloaded = any(unit.states is not None for unit in self._units)
        shelf = ActivationStore(self._offload) if config.checkpointing.offload else None
        self._recompute = Recompute(model, self._units if config.checkpointing.enabled else (), shelf)
        self._schedule = Schedule(model, self._units, Ahead.of(config.runtime), self._clock)
        self._schedule.reduces = self._reduces
        self._schedule.on_reduced = self._on_reduced
        self._schedule.on_plain_backward = self._check_plain_backward
        self._schedule.on_broken = self.zero_grad
        self._schedule.on_last_unit = self._offload.pool.trim
        self._grad_hooks: list[Callable[[str, torch.Tensor], None]] = []
        self._update_hooks: list[Callable[[], None]] = []
        self._pause: str | None = None
        self.averages: list[Ema] = []
        self._access = access.Access(self)
        self._overrides = ModuleGuard(model)

    # The loop

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, in the configured precision."""
        precision = self.config.precision
        dtype = DTYPES[precision.compute]
        if precision.cast_inputs and not precision.autocast:
            args, kwargs = map_tensors((args, kwargs), lambda t: t.to(dtype) if t.is_floating_point() else t)
        try:
            autocast = torch.autocast(self._comm.device.type, dtype, enabled=precision.autocast)
            with self._telling("forward"), self._schedule.rehearsal.watching(), autocast:
                return self.module(*args, **kwargs)
        except BaseException:
            self._schedule.rest()
            raise

    def backward(self, loss: torch.Tensor, scale: bool = True) -> None:
        """Gradients of `loss`, divided by the number of micro-batches (unless `scale` is False), and reduced.

        A plain `loss.backward()` does the same without the division; not in fp16, where the loss has to be scaled.
        """
        count = self.config.batch.accumulation
        if scale and count > 1:
            loss = loss * (1.0 / count)
        if self._scaler is not None:
            loss = loss.float() * self._scaler.scale
        if self._schedule.is_stale():
            self.zero_grad()
        self._schedule.begin_backward()
        try:
            with self._telling("backward"):
                loss.backward()
                self._schedule.end_backward()
        except BaseException:
            self.zero_grad()
            raise

    def step(self, closure: None = None) -> None:
        """At the accumulation boundary: clip, update, and send the new weights on their way. Otherwise count."""
        if closure is not None:
            raise TypeError(
                "engine.step() takes no closure: an optimizer that evaluates the model several times in a step "
                "cannot work on shards; call engine(...), engine.backward(loss) and engine.step() in turn"
            )
        if self._updater is None:
            raise RuntimeError("this engine has no optimizer: pass one to shardwise.initialize")
        self._check_not_paused("engine.step() cannot update")
        if self._schedule.is_stale():
            self.zero_grad()
        elif not self.is_boundary:
            self._micro_step += 1
            self._comm.micro_step = self._micro_step
        else:
            self._micro_step = 0
            with self._telling("step"):
                self._update(self._updater)
            self._comm.micro_step = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients accumulated so far and start a new accumulation. `step()` does it by itself."""
        self._schedule.abandon()
        self._micro_step = self._comm.micro_step = 0

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied with; 1.0 but in fp16. Waits for the device."""
        return self._scaler.scale.item() if self._scaler is not None else 1.0

    @property
    def was_skipped(self) -> bool:
        """Whether the last update was skipped because gradients overflowed in fp16. Waits for the device."""
        self._learn_outcome()
        return self._was_skipped

    @property
    def skipped_steps(self) -> int:
        """How many of `steps` were skipped. Waits for the device."""
        self._learn_outcome()
        return self._skipped_steps

    @property
    def is_boundary(self) -> bool:
        """Whether the next `step()` updates."""
        if self._boundary is not None:
            return self._boundary
        return self._micro_step == self.config.batch.accumulation - 1

    def set_boundary(self, is_boundary: bool | None) -> None:
        """Let the caller say whether the next `step()` updates; None gives the decision back to the counter."""
        self._boundary = is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward adds to the local gradients and sends nothing, where gradients are replicated."""
        self._syncs, before = False, self._syncs
        try:
            yield
        finally:
            self._syncs = before

    # A look inside

    def full_param(self, name: str) -> torch.Tensor:
        """A parameter's current value, whole, in the precision that is updated. A collective."""
        return access.full_param(self, name)

    def full_grad(self, name: str) -> torch.Tensor:
        """A parameter's reduced gradient, whole; between the last backward of a step and `step()`. A collective."""
        return access.full_grad(self, name)

    def full_state(self, name: str) -> dict[str, torch.Tensor]:
        """A parameter's optimizer state, whole. A collective."""
        return access.full_state(self, name)

    def register_grad_hook(self, hook: Callable[[str, torch.Tensor], None]) -> None:
        """Call `hook(unit_name, shard)` on each reduced shard of gradients, before `step()`; it may edit in place."""
        self._grad_hooks.append(hook)

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

    def account(self, entry: Entry, size_bytes: int) -> None:
        """Enter what an extension holds into the ledger."""
        self._ledger.set_bytes(entry, size_bytes)

    def report(self) -> Report:
        """Memory by kind and tier, bytes sent by kind, time by phase."""
        return Report.of(self._ledger, self._comm, self._offload.streams, self._clock, self.steps, self._expected_bytes)

    def expect(self, peak_bytes: int) -> None:
        """Have `report()` show what a plan, or `shardwise.foresee`, foresaw as this rank's peak."""
        self._expected_bytes = peak_bytes

    @property
    def comm(self) -> Comm:
        return self._comm

    @property
    def units(self) -> tuple[Unit, ...]:
        return tuple(self._units)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's state_dict with whole values. A collective where weights are sharded."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load whole values into the model, master copies included. A collective. `assign` is refused."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    # Checkpoints

    def save(
        self,
        dir: str | Path,
        tag: str | None = None,
        blocking: bool = True,
        state: dict[str, Any] | None = None,
        keep: int | None = None,
    ) -> Path:
        """Write a checkpoint into the folder `dir`; it is there complete, or not at all. A collective.

        It holds everything that training goes on from: weights, master copies, optimizer state, counters, schedules,
        random number generators, and rank 0's `state`, a dictionary of numbers, strings, lists and tensors. `tag`
        names it (`step-100`); with `keep`, only that many of the newest are kept. With `blocking` False, training goes
        on as soon as everything is copied to host memory; the next `save` or `load`, or `finish_save`, waits for it
        and raises what went wrong.
        """
        self._check_not_paused("engine.save() would take other weights than those that train")
        self.finish_save()
        job = checkpoint.prepare(self, Path(dir), tag, state, keep, staged=not blocking)
        if blocking:
            checkpoint.save(job, self._comm)
        else:
            self._saving = checkpoint.Background(job, self._comm)
        return job.draft.target

    def finish_save(self) -> None:
        """Wait until an asynchronous save is complete; raise what went wrong. A collective."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.finish()

    def load(self, dir: str | Path, tag: str = "latest", fallback: bool = False, missing_ok: bool = False) -> Any:
        """Go on from a checkpoint in `dir`, saved at any world size and placement; the user's state. A collective.

        With `fallback`, if a file of it is damaged, the newest checkpoint that is not is taken instead. If a load
        fails midway, the engine's values are part old, part new: load another one, or stop. With `missing_ok`, nothing
        happens if `dir` holds no checkpoint at all.
        """
        self._check_not_paused("engine.load() cannot replace the weights")
        self.finish_save()
        return checkpoint.load(self, Path(dir), tag, fallback, missing_ok)

    def export(
        self, dir: str | Path, dtype: str | None = None, max_file_bytes: int = checkpoint.MAX_FILE_BYTES
    ) -> None:
        """Write the weights into the new folder `dir` as Hugging Face does: safetensors, with an index if several
        files are needed. A collective.

        `dtype` is fp32, bf16 or fp16; without it, that of the weights that compute. A tied weight is written once,
        under its first name. Each rank writes what it owns straight into place: nothing is gathered.
        """
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}: take one of {', '.join(DTYPES)}")
        checkpoint.export(self, Path(dir), DTYPES[dtype] if dtype is not None else None, max_file_bytes)

    @property
    def is_at_rest(self) -> bool:
        """Whether no gradients are accumulated: the moments at which `save` works."""
        return not self._micro_step and not any(unit.grads.has_gradients for unit in self._units if unit.grads)

    def progress(self) -> dict[str, Any]:
        """The counters of training and the loss scale. Waits for the device."""
        self._learn_outcome()
        return {
            "steps": self.steps,
            "skipped_steps": self._skipped_steps,
            "was_skipped": self._was_skipped,
            "is_exhausted": self._is_exhausted,
            "scaler": self._scaler.state_dict() if self._scaler is not None else None,
            "averages": {average.key: average.updates for average in self.averages},
        }

    def set_progress(self, progress: Mapping[str, Any]) -> None:
        """Go on counting from what `progress` gave."""
        self._outcome = None
        self.steps = progress["steps"]
        self._skipped_steps = progress["skipped_steps"]
        self._was_skipped = progress["was_skipped"]
        self._is_exhausted = progress["is_exhausted"]
        if self._scaler is not None and progress["scaler"] is not None:
            self._scaler.load_state_dict(progress["scaler"])
        for average in self.averages:
            average.updates = progress.get("averages", {}).get(average.key, 0)
        if self._updater is not None:
            self._updater.account()

    def destroy(self) -> None:
        """Take the engine off the model and free every buffer; the model's parameters are then empty."""
        if self._is_destroyed:
            return
        self._is_destroyed = True
        if self._saving is not None:
            self._saving.leave()
        self._comm.begin_close()
        self._schedule.remove()
        self._recompute.remove()
        self._access.remove()
        self._overrides.remove()
        for unit in self._units:
            unit.free()
        if self._updater is not None:
            self._updater.close()
        self._offload.close()
        self._comm.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an engine cannot be copied or pickled: copy.deepcopy(engine.module) gives a plain model with whole "
            "values, on all ranks together, and engine.state_dict() its weights alone"
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    # Inside

    def _reduces(self) -> bool:
        """Whether the coming backward reduces: sharded gradients always, replicated ones at the boundary."""
        if self.config.placement.grads.sharding == "sharded":
            return True
        return self.is_boundary and self._syncs and self.config.gradients.reduce_at == "backward"

    def _check_plain_backward(self) -> None:
        if self._scaler is not None:
            raise RuntimeError("in fp16 the loss has to be scaled: call engine.backward(loss), not loss.backward()")

    def _on_reduced(self, unit: Unit) -> None:
        """Gradients that are final can be on their way to a replicated optimizer; nobody may edit them any more."""
        if self._is_offloaded and self.is_boundary:
            self._offload.load_ahead(self._offloaded(), self._schedule.reduced_part())
        final = self.is_boundary and self.config.placement.grads.sharding == "replicated"
        if final and not self._grad_hooks:
            assert unit.grads is not None
            unit.grads.start_gather()

    @contextlib.contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        """An exception is something that all ranks must meet with, or the others would wait in this pass for ever.

        Where memory ran out, say what was held and what would hold less.
        """
        try:
            yield
        except BaseException as error:
            if isinstance(error, torch.OutOfMemoryError):
                error.args = (f"{error}\n{oom.explain(error, self.config, self._units, self._ledger)}",)
            # A forward on replicated weights sends nothing: one rank alone may fail and try again.
            if what != "forward" or self.config.placement.weights.sharding == "sharded":
                first_line = str(error).partition("\n")[0]
                self._comm.note(f"the {what} was broken off by {type(error).__name__}: {first_line}")
            raise

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """An update that breaks off has used some of the gradients: the rest must not be stepped on by themselves."""
        try:
            yield
        except BaseException as error:
            error.add_note(
                "shardwise: step() was broken off, and some weights may be updated: load the last checkpoint"
            )
            self.zero_grad()
            raise

    def _offloaded(self) -> Iterator[UnitStates]:
        """The offloaded of what an update will bring to the device, in its order."""
        for unit in self._schedule.forward_order():
            if unit.states is not None and unit.states.is_updated and not unit.states.is_hosted:
                yield unit.states

    def _learn_outcome(self) -> None:
        """What the host does once it knows how the last step in fp16 ended: count, and step the LR scheduler."""
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            return
        self._was_skipped = outcome.was_skipped()
        self._is_exhausted = outcome.is_exhausted()
        self._skipped_steps += self._was_skipped
        if self.lr_scheduler is not None and not self._was_skipped:
            self.lr_scheduler.step()

    def _update(self, updater: Updater) -> None:
        schedule = self._schedule
        check_none_thawed(self._units)
        trainable = [unit for unit in schedule.forward_order() if unit.grads is not None]
        if not any(unit.grads.has_gradients for unit in trainable if unit.grads):
            return
        self._learn_outcome()
        if self._is_exhausted:
            # Here and nowhere else: all ranks come here, and all know.
            self.zero_grad()
            raise FloatingPointError(
                "gradients overflow in fp16 even at the smallest loss scale (precision.loss_scale.minimum): the model "
                "diverges, or its values do not fit fp16; lower the learning rate, or compute in bf16"
            )
        schedule.reduce_all()
        schedule.let_go()
        schedule.release_all()
        grads = [unit.grads for unit in trainable if unit.grads is not None]
        for hook in self._grad_hooks:
            for each in grads:
                each.edit(partial(hook, each.name))
        with self._clock.phase("norm"):
            scaled = clipping.global_norm(grads, self._comm, self.config.gradients.deterministic)
        scale = self._scaler.scale if self._scaler is not None else None
        self.grad_norm, overflow, coefficient = clipping.unscale(scaled, scale, self.config.gradients.clip_norm)
        self._offload.turn()
        with self._clock.phase("update"), self._all_or_nothing():
            skips = updater.begin(overflow)
            for units in updater.update_batches(trainable) if not skips else ():
                updater.update(units, coefficient)
                for unit in units:
                    unit.weights.refresh()
            for each in grads if skips else ():
                each.clear()
        self._offload.streams.drain()
        updater.finish()
        for update_hook in self._update_hooks:
            update_hook()
        self.steps += 1
        self._budget.spend(trainable, updater)
        self._is_offloaded = any(unit.states is not None for unit in self._units)
        if self._scaler is not None and overflow is not None:
            self._outcome = Outcome(overflow, self._scaler.update(overflow))
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step()
        every = self.config.runtime.steps_per_print
        if every and self.steps % every == 0 and self._comm.rank == 0:
            rates = ", ".join(f"{group['lr']:.3g}" for group in updater.optimizer.param_groups)
            _LOG.info("step %d, learning rate %s, gradient norm %.4g", self.steps, rates, self.grad_norm.item())
