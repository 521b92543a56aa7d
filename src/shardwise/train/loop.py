"""The training loop: train, validate, log, save, and stop on a signal.

Besides the engine's own collectives there are two: before every step the ranks agree whether to stop, since a signal
may reach only one of them, and when metrics are due they average them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardwise.comm import Comm
from shardwise.engine.engine import Engine
from shardwise.machine.memory import process_memory
from shardwise.observe.analyzer import MemoryAnalyzer, MemoryPoint
from shardwise.train.data import Indices, SampleLoader, validation_batches
from shardwise.train.folder import MetricsFiles, RunFolder, StepMetrics, TrainPosition
from shardwise.train.job import TrainJob
from shardwise.train.screen import Screen

if TYPE_CHECKING:  # torch's pipelining takes seconds to import
    from shardwise.pipelining.pipeline import Pipeline

Samples = tuple[torch.Tensor, torch.Tensor]
Phase = Callable[[str], contextlib.AbstractContextManager[Any]]
WATCHED = 2
"""The memory of the last steps is measured; the report shows that of the very last one."""


@dataclass
class MemoryTrace:
    """One step in short intervals: when each ended, and the bytes by kind at its peak."""

    times_s: list[float]
    kinds: list[dict[str, int]]
    phases: list[tuple[str, float, float]]

    @property
    def peak_bytes(self) -> int:
        return sum(self.at_peak.values())

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes by kind at the peak of the step."""
        return max(self.kinds, key=lambda kinds: sum(kinds.values()))


class StepWatch(MemoryAnalyzer):
    """Measures the memory of steps of an engine, on every rank: a point after each module and each gradient.

    The optimizer's state gets its label when the optimizer runs, so watch one step before the step that counts.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._hooked = engine.module
        self._handles: list[Any] = []

    def start(self) -> StepWatch:
        super().start()
        for module in self._hooked.modules():
            if next(module.parameters(recurse=False), None) is not None:
                self._handles.append(module.register_forward_hook(self._on_hook))
        for param in self._hooked.parameters():
            self._handles.append(param.register_post_accumulate_grad_hook(self._on_hook))
        return self

    def stop(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        super().stop()

    def begin_step(self) -> None:
        """Drop the points of earlier steps."""
        self.points.clear()
        self.phases.clear()
        self.record("before the step")

    def end_step(self) -> MemoryTrace:
        """The trace since `begin_step`."""
        self.record("end of the step")
        first, *points = self.points
        times_s = [point.time_s - first.time_s for point in points]
        phases = [(name, start - first.time_s, end - first.time_s) for name, start, end in self.phases]
        return MemoryTrace(times_s, [complete_kinds(point) for point in points], phases)

    def _on_hook(self, *_: Any) -> None:
        self.record("")


def complete_kinds(point: MemoryPoint) -> dict[str, int]:
    """The bytes by kind at a point's peak, with all that no tensor holds as "other".

    On CUDA that is what the allocator rounds up and what libraries keep (cuBLAS workspaces). A dry run counts both.
    """
    rest = point.peak_bytes - sum(point.peak_kinds.values())
    return point.peak_kinds | {"other": point.peak_kinds.get("other", 0) + max(0, rest)}


class EngineTrainer:
    """Trains with one engine. `engines` are those of this rank."""

    def __init__(self, model: Engine) -> None:
        self.model = model
        self.engines = (model,)

    def step(self, batches: Iterable[Samples], count: int, phase: Phase) -> torch.Tensor:
        """Train on the micro-batches of a step, `count` of them; their mean loss."""
        losses = torch.zeros((), device=self.model.comm.device)
        for inputs, targets in batches:
            with phase("forward"):
                loss = self.model(inputs, targets)
            losses += loss.detach() / count
            with phase("backward"):
                self.model.backward(loss)
            del loss
            with phase("update"):
                self.model.step()
        return losses

    @torch.no_grad()
    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of a batch, without training on it."""
        self.model.eval()
        loss: torch.Tensor = self.model(inputs, targets)
        self.model.train()
        return loss


class PipelineTrainer:
    """Trains with a pipeline, which runs the micro-batches of a step itself."""

    def __init__(self, model: Pipeline) -> None:
        self.model = model
        self.engines = tuple(model.engines.values())

    def step(self, batches: Iterable[Samples], count: int, phase: Phase) -> torch.Tensor:
        inputs, targets = zip(*batches, strict=True)
        return self.model.train_step((torch.cat(inputs), torch.cat(targets)))

    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.model.evaluate((inputs, targets))


Trainer = EngineTrainer | PipelineTrainer


@dataclass
class RankProcess:
    """The process that the loop runs in. A signal sets `stop_requested`."""

    device: torch.device
    stop_requested: bool = False


@dataclass
class TrainLoop:
    """A run on one rank. Rank 0 has `metrics`."""

    job: TrainJob
    process: RankProcess
    comm: Comm
    trainer: Trainer
    loader: SampleLoader
    screen: Screen
    metrics: MetricsFiles | None

    def __post_init__(self) -> None:
        self.step = 0
        self.elapsed_s = 0.0
        self.trace: MemoryTrace | None = None
        # Losses, norms and rates of recent steps. They stay on the device: reading them makes the host wait for it.
        self._pending: list[tuple[torch.Tensor, torch.Tensor, float]] = []
        self._mark_s = time.perf_counter()
        self._speed = 0.0
        self._saved_step = 0

    def resume(self, position: TrainPosition) -> None:
        """Continue from the position in a checkpoint."""
        self.step = self._saved_step = position.step
        self.loader.taken = position.taken
        self.elapsed_s = position.elapsed_s

    def train(self) -> bool:
        """Train the remaining steps. False if a signal stopped the loop before the last one."""
        self.screen.start(self.step, self.job.steps)
        self._mark_s = time.perf_counter()
        with contextlib.ExitStack() as stack:
            stack.callback(self.screen.stop)
            watch: StepWatch | None = None
            while self.step < self.job.steps and not self._agree_to_stop():
                if watch is None and self.step >= self.job.steps - WATCHED:
                    watch = self._begin_watching(stack)
                self._train_step(watch)
                self._after_step()
        self._flush()
        if self.step > self._saved_step:
            self.save(blocking=True)
        self.trainer.model.finish_save()  # a save that started after this step
        return self.step >= self.job.steps

    def _begin_watching(self, stack: contextlib.ExitStack) -> StepWatch | None:
        """Measure the memory of the steps from here on. A pipeline is not measured."""
        if not isinstance(self.trainer, EngineTrainer):
            return None
        self._flush()  # measuring slows steps down: keep them out of the speed
        self.trainer.model.finish_save()  # and keep the buffers of a save out of the measured memory
        watch = StepWatch(self.trainer.model)
        stack.enter_context(watch)
        return watch

    def evaluate(self) -> float:
        """The mean loss over the validation windows."""
        total = torch.zeros(2, dtype=torch.float64)
        samples = self.job.options.intervals.eval_samples
        for batch in validation_batches(self.job.windows[1], samples, self.loader.share):
            loss = self.trainer.evaluate(*self._move(batch))
            total += torch.tensor([loss.item() * len(batch), len(batch)], dtype=torch.float64)
        loss_sum, count = self.comm.share(total).sum(0).tolist()
        return float(loss_sum / count)

    def save(self, blocking: bool) -> None:
        """Save a checkpoint, with the position of this loop."""
        position = {"step": self.step, "taken": self.loader.taken, "elapsed_s": self.elapsed_s}
        state = {**position, "identity": self.job.identity}
        outputs, tag = self.job.options.outputs, f"step-{self.step}"
        folder = RunFolder(outputs.out).checkpoints
        self.trainer.model.save(folder, tag=tag, blocking=blocking, state=state, keep=outputs.keep)
        self._saved_step = self.step

    def _train_step(self, watch: StepWatch | None) -> None:
        optimizer = self.trainer.engines[0].optimizer
        assert optimizer is not None
        phase: Phase = watch.phase if watch is not None else lambda name: contextlib.nullcontext()
        if watch is not None:
            watch.begin_step()
        rate = optimizer.param_groups[0]["lr"]
        batches = (self._move(batch) for batch in self.loader.step())
        losses = self.trainer.step(batches, self.loader.share.accumulation, phase)
        self.trace = watch.end_step() if watch is not None else None
        assert self.trainer.model.grad_norm is not None
        self._pending.append((losses, self.trainer.model.grad_norm, float(rate)))
        self.step += 1
        self.screen.advance(self.step)

    def _after_step(self) -> None:
        job, step = self.job, self.step
        if job.is_due("eval", step) or job.is_due("log", step):
            self._flush(validate=job.is_due("eval", step))
        if job.is_due("save", step) and step < job.steps:
            self._flush()  # the metrics files must reach the step of the checkpoint
            self.save(blocking=False)

    def _flush(self, validate: bool = False) -> None:
        """Average, write and show the metrics of the steps since the last flush. A collective."""
        if not self._pending:
            return
        losses, norms, rates = zip(*self._pending, strict=True)
        count, first = len(rates), self.step - len(rates) + 1
        mean_losses = self.comm.share(torch.stack(losses).double().cpu()).mean(0).tolist()  # in rank order
        grad_norms = torch.stack(norms).double().tolist()
        self._pending.clear()
        seconds = time.perf_counter() - self._mark_s
        self.elapsed_s += seconds
        val_loss = self.evaluate() if validate else None
        memory = self.comm.share(torch.tensor(memory_in_use(self.process.device))).amax(0).tolist()
        if self.trace is None or not self._speed:
            self._speed = round(count * self.job.tokens_per_step / max(seconds, 1e-9), 1)
        rows = [
            StepMetrics(
                step=step,
                tokens=step * self.job.tokens_per_step,
                loss=loss,
                val_loss=val_loss if step == self.step else None,
                lr=rate,
                grad_norm=norm,
                tokens_per_s=self._speed,
                memory_bytes=memory[0],
                peak_bytes=memory[1],
                time_s=round(self.elapsed_s, 3),
            )
            for step, (loss, norm, rate) in enumerate(zip(mean_losses, grad_norms, rates, strict=True), first)
        ]
        if self.metrics is not None:
            self.metrics.add(rows)
        self.screen.show(rows[-1], eta_s=(self.job.steps - self.step) * seconds / count)
        self._mark_s = time.perf_counter()

    def _agree_to_stop(self) -> bool:
        return bool(self.comm.share(torch.tensor([int(self.process.stop_requested)])).any())

    def _move(self, batch: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.from_numpy(batch).to(self.process.device)
        return rows[:, :-1], rows[:, 1:]


def memory_in_use(device: torch.device) -> tuple[int, int]:
    """Bytes now and at the peak: of torch's allocator on a GPU, of the whole process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    return process_memory()
