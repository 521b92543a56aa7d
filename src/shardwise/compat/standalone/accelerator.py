"""`deepspeed.accelerator`: the device of this process, CUDA if there is one, else the CPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from shardwise.machine.memory import host_bytes, process_memory


class DeepSpeedAccelerator:
    """Questions about a kind of device. What torch answers by the same name is forwarded to it."""

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

    def device_count(self) -> int:
        return torch.cuda.device_count() if self._name == "cuda" else int(os.environ.get("LOCAL_SIZE", 1))

    def current_device_name(self) -> str:
        return self.device_name(self._torch.current_device())

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

    manual_seed_all = manual_seed

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        if self._name == "cpu":
            return torch.get_rng_state()
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        if self._name == "cpu":
            torch.set_rng_state(new_state)
        else:
            torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)

    def random(self) -> Any:
        return torch.random

    def amp(self) -> Any:
        return self._torch.amp

    def total_memory(self, device_index: int | None = None) -> int:
        return host_bytes("MemTotal") if self._name == "cpu" else torch.cuda.mem_get_info(device_index)[1]

    def available_memory(self, device_index: int | None = None) -> int:
        return host_bytes("MemAvailable") if self._name == "cpu" else torch.cuda.mem_get_info(device_index)[0]

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor.pin_memory() if self._name == "cuda" else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def is_triton_supported(self) -> bool:
        return self._name == "cuda"

    def range_push(self, message: str) -> None:
        if self._name == "cuda":
            torch.cuda.nvtx.range_push(message)

    def range_pop(self) -> None:
        if self._name == "cuda":
            torch.cuda.nvtx.range_pop()

    def __getattr__(self, name: str) -> Any:
        """What torch has of this name: for the device, or on the CPU for the process."""
        if name.startswith("_"):
            raise AttributeError(name)
        if self._name == "cpu" and (own := _of_process(name)) is not None:
            return own
        return getattr(self._torch, name) if hasattr(self._torch, name) else getattr(torch, name)


def _of_process(name: str) -> Callable[..., int | None] | None:
    """What stands for one of torch.cuda's counts of memory: that of this process. Its peak is not reset, and it has no
    cache to empty."""
    if name in ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached", "empty_cache"):
        return lambda device_index=None: None
    if name.removeprefix("max_") in ("memory_allocated", "memory_reserved", "memory_cached"):
        return lambda device_index=None: process_memory()[name.startswith("max_")]
    return None


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
