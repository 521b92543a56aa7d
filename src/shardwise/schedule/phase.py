"""Which backward a schedule is in, and whether an exception ended it without a call of the schedule."""

from __future__ import annotations

import enum
from collections.abc import Callable

from shardwise.schedule.autograd import BackwardEndCallback, inside_backward


class Phase(enum.Enum):
    """Which backward the schedule is in.

        IDLE ──begin──▶ BACKWARD ──end──▶ IDLE
          │                 ▲
          │                 └────begin────┐
          └──torch.autograd.grad──▶ AUTOGRAD_GRAD ──its end──▶ IDLE

    BACKWARD leaves gradients on parameters, AUTOGRAD_GRAD does not. `rest` leads from anywhere to IDLE.
    """

    IDLE = "idle"
    BACKWARD = "backward"
    AUTOGRAD_GRAD = "torch.autograd.grad"


_NEXT = {
    Phase.IDLE: {Phase.BACKWARD, Phase.AUTOGRAD_GRAD},
    Phase.BACKWARD: {Phase.IDLE},
    Phase.AUTOGRAD_GRAD: {Phase.BACKWARD, Phase.IDLE},
}


class PhaseMachine:
    """The current phase, and the call with which autograd ends it, if the user started the backward."""

    def __init__(self) -> None:
        self.current = Phase.IDLE
        self._end_callback: BackwardEndCallback | None = None

    def enter(self, phase: Phase) -> None:
        """The one place where the phase changes."""
        if phase is not self.current and phase not in _NEXT[self.current]:
            raise RuntimeError(f"a {phase.value} cannot begin inside a {self.current.value}")
        self.current = phase
        self._end_callback = None

    def end_with_backward(self, call: Callable[[], None]) -> None:
        """Call `call`, which ends the phase, at the end of the backward that autograd is running."""
        self._end_callback = BackwardEndCallback(call)

    @property
    def is_stale(self) -> bool:
        """Whether an exception ended a BACKWARD without a call of the schedule."""
        return self.current is Phase.BACKWARD and not inside_backward()

    @property
    def was_dropped(self) -> bool:
        """Whether an exception ended the backward at whose end autograd would have ended the phase."""
        return self._end_callback is not None and not self._end_callback.is_pending()
