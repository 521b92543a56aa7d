"""Loaders and contexts that DeepSpeed's users write around an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class RepeatingLoader:
    """An iterator over a loader that begins again when it has ended."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._rows = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._rows)
        except StopIteration:
            self._rows = iter(self.loader)
            return next(self._rows)

    def __len__(self) -> int:
        return len(self.loader)


@contextlib.contextmanager
def OnDevice(dtype: torch.dtype, device: Any = "meta", enabled: bool = True) -> Iterator[None]:
    """Within it, models are built in `dtype` on `device`."""
    if not enabled:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
