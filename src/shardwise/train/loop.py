"""The training loop: train, validate, log, save, and stop on a signal.

Besides the engine's own collectives there are two: before every step the ranks agree whether to stop, since a signal
may reach only one of them, and when metrics are due they average them.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

import torch

from shardwise.comm import Comm
from shardwise.machine.memory import process_memory
from shardwise.train.data import Indices, SampleLoader, validation_batches
from shardwise.train.folder import MetricsFiles, RunFolder, StepMetrics, TrainPosition
from shardwise.train.job import TrainJob
from shardwise.train.screen import Screen
from shardwise.train.step_watch import MemoryTrace, StepWatch
from shardwise.train.trainers import EngineTrainer, Phase, Trainer

WATCHED = 2
"""The memory of the last steps is measured; the report shows that of the very last one."""


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
        try:
            with contextlib.ExitStack() as stack:
                watch: StepWatch | None = None
                while self.step < self.job.steps and not self._agree_to_stop():
                    is_near_end = self.step >= self.job.steps - WATCHED
                    if watch is None and is_near_end and isinstance(self.trainer, EngineTrainer):
                        self._flush()  # measuring slows steps down: keep them out of the speed
                        self.trainer.model.finish_save()  # and keep the buffers of a save out of the measured memory
                        watch = StepWatch(self.trainer.model)
                        stack.enter_context(watch)
                    self._train_step(watch)
                    self._after_step()
        finally:
            self.screen.stop()
        self._flush()
        if self.step > self._saved_step:
            self.save(blocking=True)
        self.trainer.model.finish_save()  # a save that started after this step
        return self.step >= self.job.steps

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
