"""Timers, constants, small functions and contexts by DeepSpeed's names: logging, loaders, versions, experts."""

from __future__ import annotations

import contextlib
import logging
import operator
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn

from shardwise.compat.standalone.accelerator import get_accelerator
from shardwise.errors import CompatibilityError
from shardwise.tensors import map_tensors

MIN_SWAPPABLE_BYTES = 1 << 20
ROUTE_TRAIN, ROUTE_EVAL, ROUTE_PREDICT = "train", "eval", "predict"
TRAIN_BATCH_SIZE, TRAIN_MICRO_BATCH_SIZE_PER_GPU = "train_batch_size", "train_micro_batch_size_per_gpu"
GRADIENT_ACCUMULATION_STEPS = "gradient_accumulation_steps"


class _Output(logging.StreamHandler[TextIO]):
    """Writes to what is the standard output by then."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stdout
        super().emit(record)


def _make_logger() -> logging.Logger:
    """DeepSpeed's logger, which shows information on the standard output, unless the program gave it a handler."""
    made = logging.getLogger("DeepSpeed")
    if not made.handlers:
        shown = _Output(sys.stdout)
        shown.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d] %(message)s"))
        made.addHandler(shown)
        made.setLevel(logging.INFO)
        made.propagate = False
    return made


logger = _make_logger()
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
    """Log on some ranks; -1, or none given, means all. Without a process group, log."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    if not ranks or rank == -1 or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message, stacklevel=2)


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


def move_to_device(item: Any, device: Any, criterion_func: Callable[[torch.Tensor], bool] | None = None) -> Any:
    """The same containers with their tensors on `device`; with a criterion, those that meet it."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device) if criterion_func is None or criterion_func(tensor) else tensor

    return map_tensors(item, moved)


def recursive_getattr(model: Any, module_name: str) -> Any:
    """What an object has under a dotted name."""
    return operator.attrgetter(module_name)(model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Replace what an object has under a dotted name."""
    owner, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, owner) if owner else model, name, module)


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


class Timer:
    """The times between `start` and `stop`, in milliseconds. Both wait for the device."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.records: list[float] = []
        self._since: float | None = None

    def start(self) -> None:
        if self._since is not None:
            raise AssertionError(f"{self.name} timer has already been started: call stop() first")
        self._since = _now()

    def stop(self, reset: bool = False, record: bool = False) -> None:
        if self._since is None:
            raise AssertionError(f"{self.name} timer is not started: call start() first")
        self.records.append((_now() - self._since) * 1e3)
        self._since = None

    def elapsed(self, reset: bool = True) -> float:
        """The sum; a timer that runs goes on."""
        runs = self._since is not None
        if runs:
            self.stop()
        total = sum(self.records)
        if reset:
            self.reset()
        if runs:
            self.start()
        return total

    def mean(self) -> float:
        return sum(self.records) / len(self.records) if self.records else 0.0

    def reset(self) -> None:
        self.records = []
        self._since = None


def _now() -> float:
    get_accelerator().synchronize()
    return time.perf_counter()


class SynchronizedWallClockTimer:
    """Timers by name, made when they are first asked for."""

    def __init__(self) -> None:
        self.timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        return self.timers.setdefault(name, Timer(name))

    def has_timer(self, name: str) -> bool:
        return name in self.timers

    def get_timers(self) -> dict[str, Timer]:
        return self.timers

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Log the sums of some timers, each divided by `normalizer`."""
        found = [self.timers[name] for name in names if name in self.timers]
        times = [f"{timer.name}: {timer.elapsed(reset=reset) / normalizer:.2f}" for timer in found]
        log_dist(" | ".join(["time (ms)", *times]), ranks or [0])

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """The mean of each timer, divided by `normalizer`."""
        return {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}


class ThroughputTimer:
    """`engine.tput_timer`: it counts epochs for scripts that say when one ends, and measures nothing."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.epoch_count = 0

    def update_epoch_count(self) -> None:
        self.epoch_count += 1

    def start(self) -> None:
        """Does nothing."""

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Does nothing."""
