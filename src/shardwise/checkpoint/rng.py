"""The states of the random number generators: torch's (CPU and device), Python's and numpy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def capture(device: torch.device) -> dict[str, Any]:
    """What `restore` needs, as numbers and tensors."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    kind, keys, *rest = np.random.get_state()
    if kind == "MT19937":
        states["numpy"] = [torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest]
    return states


def restore(states: dict[str, Any], device: torch.device) -> None:
    """Bring the generators back to where `capture` found them."""
    torch.set_rng_state(states["torch"])
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    if "numpy" in states:
        keys, *rest = states["numpy"]
        np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))
