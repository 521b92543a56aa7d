"""`deepspeed.accelerator`: the device of this process, CUDA if there is one, else the CPU."""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Any

import torch


class DeepSpeedAccelerator:
    """Questions about a kind of device, forwarded to torch."""

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._communication_backend_name = "nccl" if kind == "cuda" else "gloo"

    @property
    def _torch(self) -> Any:
        return torch.cuda if self._name == "cuda" else torch.cpu

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        return torch.device(self.device_name(device_index))

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return torch.cuda.device_count() if self._name == "cuda" else int(os.environ.get("LOCAL_SIZE", 1))

    def set_device(self, device_index: int) -> None:
        if self._name == "cuda":
            torch.cuda.set_device(device_index)

    def current_device(self) -> int | str:
        return torch.cuda.current_device() if self._name == "cuda" else "cpu"

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}" if self._name == "cuda" else "cpu"

    def communication_backend_name(self) -> str:
        return self._communication_backend_name

    def is_bf16_supported(self) -> bool:
        return self._name == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    def is_synchronized_device(self) -> bool:
        return self._name == "cpu"

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.cuda.get_rng_state(device_index or "cuda") if self._name == "cuda" else torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        if self._name == "cuda":
            torch.cuda.set_rng_state(new_state, device_index or "cuda")
        else:
            torch.set_rng_state(new_state)

    def synchronize(self, device_index: int | None = None) -> None:
        if self._name == "cuda":
            torch.cuda.synchronize(device_index)

    def empty_cache(self) -> None:
        if self._name == "cuda":
            torch.cuda.empty_cache()

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor.pin_memory() if self._name == "cuda" else tensor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._torch, name)


@cache
def get_accelerator() -> DeepSpeedAccelerator:
    """The accelerator of this process; DS_ACCELERATOR names another kind."""
    return DeepSpeedAccelerator(os.environ.get("DS_ACCELERATOR") or ("cuda" if torch.cuda.is_available() else "cpu"))


def is_current_accelerator_supported() -> bool:
    return True


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the memory that torch's allocator holds, if `force`."""
    if force and torch.cuda.is_available():
        held, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        logging.getLogger("DeepSpeed").info("%s: %s bytes allocated, %s at most", message, held, peak)


def empty_cache() -> None:
    get_accelerator().empty_cache()
