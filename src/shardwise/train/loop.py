"""The loop: train, look, save; leave when asked.

What is decided together: whether to stop, after every step (a signal may reach one rank only), and the figures, when
they are wanted. Nothing else makes a rank wait for the others, but the engine's own collectives.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from shardwise.comm.comm import Comm
from shardwise.engine.engine import Engine
from shardwise.train.data import Loader, validation_batches
from shardwise.train.folder import Folder
from shardwise.train.job import Job
from shardwise.train.memory import Trace, Watch, held
from shardwise.train.metrics import Metrics, Pending, Row
from shardwise.train.order import Indices
from shardwise.train.screen import Screen

WATCHED = 2
"""The last steps are taken under observation, and the very last one is what the report shows."""


class Here(Protocol):
    """What the loop asks of a place."""

    @property
    def device(self) -> torch.device: ...

    @property
    def stop(self) -> bool: ...


@dataclass
class Loop:
    """A run under way."""

    job: Job
    here: Here
    comm: Comm
    engine: Engine
    loader: Loader
    screen: Screen
    metrics: Metrics | None

    def __post_init__(self) -> None:
        self.step = 0
        self.elapsed_s = 0.0
        self.trace: Trace | None = None
        self.foreseen_bytes: int | None = None
        self._pending = Pending()
        self._mark_s = time.perf_counter()
        self._speed = 0.0
        self._saved_step = 0

    def resume(self, state: dict[str, float]) -> None:
        """Go on where a checkpoint was made."""
        self.step = self._saved_step = int(state["step"])
        self.loader.taken = int(state["taken"])
        self.elapsed_s = float(state["elapsed_s"])

    def train(self) -> bool:
        """Take the steps that are left; whether all were taken, or a signal came before."""
        self.screen.start(self.step, self.job.steps)
        self._mark_s = time.perf_counter()
        try:
            with contextlib.ExitStack() as stack:
                watch = None
                while self.step < self.job.steps and not self._is_asked_to_stop():
                    if watch is None and self.step >= self.job.steps - WATCHED:
                        self._flush()  # the clock leaves out what is watched
                        self.engine.finish_save()  # and memory, what is being saved
                        watch = stack.enter_context(Watch(self.engine))
                    self._take_step(watch)
                    self._after_step()
        finally:
            self.screen.stop()
        self._flush()
        if self.step > self._saved_step:
            self.save(blocking=True)
        self.engine.finish_save()  # one that was begun at this very step
        return self.step >= self.job.steps

    def evaluate(self) -> float:
        """The mean loss of the windows held out."""
        self.engine.eval()
        total = torch.zeros(2, dtype=torch.float64)
        samples = self.job.options.intervals.eval_samples
        with torch.no_grad():
            for batch in validation_batches(self.job.windows[1], samples, self.loader.share):
                inputs, targets = self._move(batch)
                loss = self.engine(inputs, targets)
                total += torch.tensor([loss.item() * len(batch), len(batch)], dtype=torch.float64)
        self.engine.train()
        loss_sum, count = self.comm.share(total).sum(0).tolist()
        return float(loss_sum / count)

    def save(self, blocking: bool) -> None:
        """A checkpoint of everything, this loop's place included."""
        state = {"step": self.step, "taken": self.loader.taken, "elapsed_s": self.elapsed_s}
        outputs = self.job.options.outputs
        self.engine.save(
            Folder(outputs.out).checkpoints,
            tag=f"step-{self.step}",
            blocking=blocking,
            state=state | {"identity": self.job.identity},
            keep=outputs.keep,
        )
        self._saved_step = self.step

    def _take_step(self, watch: Watch | None) -> None:
        losses = torch.zeros((), device=self.here.device)
        phase = watch.phase if watch is not None else _no_phase
        with watch.step() if watch is not None else contextlib.nullcontext() as trace:
            for batch in self.loader.step():
                inputs, targets = self._move(batch)
                with phase("forward"):
                    loss = self.engine(inputs, targets)
                losses += loss.detach() / self.loader.share.accumulation
                with phase("backward"):
                    self.engine.backward(loss)
                del loss
                rate = self._rate()
                with phase("update"):
                    self.engine.step()
        self.trace = trace
        assert self.engine.grad_norm is not None
        self._pending.add(losses, self.engine.grad_norm, rate)
        self.step += 1
        self.screen.advance(self.step)

    def _after_step(self) -> None:
        job, step = self.job, self.step
        if job.is_due("eval", step):
            self._flush(validate=True)
        elif job.is_due("log", step):
            self._flush()
        if job.is_due("save", step) and step < job.steps:
            self._flush()  # the files must not fall behind the checkpoint
            self.save(blocking=False)

    def _flush(self, validate: bool = False) -> None:
        """Bring the figures of the steps since the last time together. A collective."""
        count = len(self._pending)
        if not count:
            return
        rates = self._pending.rates
        losses, norms = self._pending.take(self.comm)
        seconds = time.perf_counter() - self._mark_s
        self.elapsed_s += seconds
        val_loss = self.evaluate() if validate else None
        memory = self.comm.share(torch.tensor(held(self.here.device))).amax(0).tolist()
        if self.trace is None or not self._speed:
            self._speed = round(count * self.job.tokens_per_step / max(seconds, 1e-9), 1)
        rows = [
            Row(
                step=(step := self.step - count + 1 + index),
                tokens=step * self.job.tokens_per_step,
                loss=losses[index],
                val_loss=val_loss if index == count - 1 else None,
                lr=rates[index],
                grad_norm=norms[index],
                tokens_per_s=self._speed,
                memory_bytes=memory[0],
                peak_bytes=memory[1],
                time_s=round(self.elapsed_s, 3),
            )
            for index in range(count)
        ]
        if self.metrics is not None:
            self.metrics.add(rows)
        left_s = (self.job.steps - self.step) * seconds / count
        self.screen.show(rows[-1], left_s)
        self._mark_s = time.perf_counter()

    def _is_asked_to_stop(self) -> bool:
        return bool(self.comm.share(torch.tensor([int(self.here.stop)])).any())

    def _rate(self) -> float:
        assert self.engine.optimizer is not None
        return float(self.engine.optimizer.param_groups[0]["lr"])

    def _move(self, batch: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.from_numpy(batch).to(self.here.device)
        return rows[:, :-1], rows[:, 1:]


@contextlib.contextmanager
def _no_phase(name: str) -> Iterator[None]:
    yield
