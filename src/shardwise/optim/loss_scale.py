"""Loss scaling: keeps fp16 gradients in range, decided on the device so that the host never waits for a step.

The loss is multiplied by the scale before the backward, the reduced gradients divided by it before the update. If
their norm is not finite, a gradient overflowed: all ranks see the same norm, so all skip the same step and no state
changes. A dynamic scale halves after `hysteresis` overflows and doubles after `window` good steps in a row.

What the host learns of a step (`was_skipped`) is copied asynchronously; asking for it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwise.config.sections import LossScale, Precision
from shardwise.schedule.autograd import current_task
from shardwise.tensors import HostFlags

_FACTOR = 2.0


class Scaler:
    """The loss scale and its counters, on the device."""

    def __init__(self, settings: LossScale, device: torch.device) -> None:
        self._settings = settings
        self.scale = torch.tensor(settings.initial, dtype=torch.float32, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._patience = torch.tensor(settings.hysteresis, dtype=torch.int32, device=device)

    @classmethod
    def of(cls, precision: Precision, device: torch.device) -> Scaler | None:
        """A scaler where the precision needs one."""
        return cls(precision.loss_scale, device) if precision.compute == "fp16" else None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The scale and its counters."""
        return {"scale": self.scale, "good_steps": self._good_steps, "patience": self._patience}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from what `state_dict` gave."""
        device = self.scale.device
        self.scale, self._good_steps = state["scale"].to(device), state["good_steps"].to(device)
        self._patience = state["patience"].to(device)

    def update(self, overflow: torch.Tensor) -> torch.Tensor:
        """Adjust the scale after one step; returns whether it would have to fall below its minimum."""
        if not self._settings.dynamic:
            return torch.zeros_like(overflow)
        settings, patience = self._settings, self._patience
        shrinks = overflow & (patience == 1)
        at_minimum = shrinks & (self.scale <= settings.minimum)
        self._good_steps = torch.where(overflow, 0, self._good_steps + 1)
        grows = ~overflow & (self._good_steps % settings.window == 0)
        recovers = ~overflow if settings.consecutive_hysteresis else grows
        self._patience = torch.where(recovers, settings.hysteresis, patience - (overflow & ~shrinks).to(patience.dtype))
        smaller = (self.scale / _FACTOR).clamp(min=settings.minimum)
        self.scale = torch.where(shrinks, smaller, torch.where(grows, self.scale * _FACTOR, self.scale))
        return at_minimum


class LossScaling:
    """The scaler of an engine, if its precision needs one, and the outcomes of its steps as far as the host knows."""

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self.scaler = Scaler.of(precision, device)
        self.skipped_steps = 0
        self.was_skipped = False
        self.is_exhausted = False
        self._scaled_task = -1  # the last backward that began at a loss of `noted`
        self._outcome: HostFlags | None = None
        """Whether the last step was skipped, and whether at the smallest scale; being copied to the host."""

    @property
    def scale(self) -> torch.Tensor | None:
        return self.scaler.scale if self.scaler is not None else None

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale; as it is where there is none."""
        return loss.float() * self.scaler.scale if self.scaler is not None else loss

    def noted(self, loss: torch.Tensor) -> torch.Tensor:
        """A scaled loss from which a plain `.backward()` may begin."""
        if self.scaler is not None and loss.requires_grad:
            loss.register_hook(self._note_task)
        return loss

    def _note_task(self, _: torch.Tensor) -> None:
        self._scaled_task = current_task()

    def check_plain_backward(self) -> None:
        """In a backward that the user began: refuse it if its loss lacks the scale."""
        if self.scaler is not None and self._scaled_task != current_task():
            raise RuntimeError(
                "Loss scaling is required in fp16: call engine.backward(loss), or engine.scale(loss).backward(), not "
                "loss.backward(); if another engine's backward reaches this model, freeze it meanwhile "
                "(requires_grad_(False)), or compute in bf16"
            )

    def note(self, overflow: torch.Tensor) -> None:
        """Record the outcome of a step, and start its copy to the host."""
        assert self.scaler is not None
        self._outcome = HostFlags(torch.stack([overflow, self.scaler.update(overflow)]))

    def learn(self) -> bool:
        """Wait for the outcome of the last step; returns whether it is news that it was applied."""
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            return False
        self.was_skipped, self.is_exhausted = outcome.wait()
        self.skipped_steps += self.was_skipped
        return not self.was_skipped

    def check_not_exhausted(self, drop: Callable[[], None]) -> None:
        """Drop the gradients and raise if they overflow even at the smallest scale. All ranks call it in the same step,
        and all know the outcome."""
        if self.is_exhausted:
            drop()
            raise FloatingPointError(
                "gradients overflow in fp16 even at the smallest loss scale (precision.loss_scale.minimum): the model "
                "diverges, or its values do not fit fp16; lower the learning rate, or compute in bf16"
            )

    def state_dict(self) -> dict[str, Any]:
        """What checkpoints keep."""
        return {
            "skipped_steps": self.skipped_steps,
            "was_skipped": self.was_skipped,
            "is_exhausted": self.is_exhausted,
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` gave."""
        self._outcome = None
        self.skipped_steps = state["skipped_steps"]
        self.was_skipped = state["was_skipped"]
        self.is_exhausted = state["is_exhausted"]
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
