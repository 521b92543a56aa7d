"""A second `train()` of Transformers' Trainer."""

from __future__ import annotations

import gc
import sys
from typing import Any


def unwrap_in_trainers(engine: Any) -> None:
    """Set `model_wrapped` to `model` in each Trainer that refers to a destroyed engine.

    `Trainer.train` has Accelerate destroy the engine of an earlier `train` or `evaluate`, but passes the model to
    Accelerate again only if `model_wrapped` is the model itself.
    """
    trainer_class = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if trainer_class is None:
        return
    for candidate in gc.get_objects():
        if issubclass(type(candidate), trainer_class) and getattr(candidate, "model_wrapped", None) is engine:
            candidate.model_wrapped = candidate.model
