"""Constants, small functions and contexts by DeepSpeed's names: logging, loaders, versions, experts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.errors import CompatibilityError

MIN_SWAPPABLE_BYTES = 1 << 20

logger = logging.getLogger("DeepSpeed")
log_levels = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
torch_info: dict[str, Any] = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": True,
    "cuda_version": "0.0",  # unknown: asked of torch where it matters
    "nccl_version": "0.0",
    "hip_version": "0.0",
}


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on some ranks; -1, or none given, means all."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


@cache
def warning_once(*args: Any, **kwargs: Any) -> None:
    """Log a warning the first time."""
    logger.warning(*args, **kwargs)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of DeepSpeed's logger, or of another, by a name of `log_levels`."""
    if log_level_str.lower() not in log_levels:
        raise ValueError(f"{log_level_str}: expected one of {', '.join(log_levels)}")
    (custom_logger or logger).setLevel(log_levels[log_level_str.lower()])


def get_current_level() -> int:
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Whether messages of a level are logged."""
    return get_current_level() <= log_levels[max_log_level_str.lower()]


def set_random_seed(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    import random

    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


class Monitor:
    """`engine.monitor`: nothing is written; log from the loop."""

    enabled = False

    def write_events(self, event_list: Any) -> None:
        """Does nothing."""


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """Whether torch's version lies between two, both included."""
    own = _numbers(torch.__version__)
    is_new = min_version is None or own >= _numbers(min_version)
    return is_new and (max_version is None or own[: len(_numbers(max_version))] <= _numbers(max_version))


def _numbers(version: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in str(version).partition("+")[0].split(".")[:2] if part.isdigit())


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """A call as it would be written."""
    return f"{base}({', '.join([*map(repr, args), *(f'{key}={value!r}' for key, value in kwargs.items())])})"


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> torch.Tensor:
    """torch's, for parameters outside an engine; `engine.clip_grad_norm_` clips those of an engine."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)


def instrument_w_nvtx(func: Any) -> Any:
    """The function itself: torch.profiler shows the phases of the engine."""
    return func


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


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether DeepSpeed's MoE layer has marked a parameter as an expert's."""
    return not getattr(param, "allreduce", True)


def has_moe_layers(model: nn.Module) -> tuple[bool, int]:
    """Whether a model has such parameters, and how many experts: always 0."""
    return any(is_moe_param(param) for param in model.parameters()), 0


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: float | None = None
) -> list[dict[str, Any]]:
    """The same groups: there are no experts to separate."""
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    if any(is_moe_param(param) for group in groups for param in group["params"]):
        raise CompatibilityError(
            "DeepSpeed's MoE layer asks for expert parallelism: use the model library's own experts, which are sharded "
            "like all other parameters"
        )
    return groups


def is_compile_supported() -> bool:
    return True


def disable(func: Any) -> Any:
    """Keep torch.compile out of a function."""
    return torch.compiler.disable(func)


def is_compiling() -> bool:
    return torch.compiler.is_compiling()
