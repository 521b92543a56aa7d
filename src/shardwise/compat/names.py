"""Names of DeepSpeed's that are constants, enumerations or small functions."""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

ADAM_OPTIMIZER, ADAMW_OPTIMIZER = "adam", "adamw"
ADAGRAD_OPTIMIZER, LION_OPTIMIZER = "adagrad", "lion"

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST, ONE_CYCLE = "LRRangeTest", "OneCycle"
WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]
LR_RANGE_TEST_MIN_LR, LR_RANGE_TEST_STEP_RATE = "lr_range_test_min_lr", "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE, LR_RANGE_TEST_STAIRCASE = "lr_range_test_step_size", "lr_range_test_staircase"
CYCLE_MIN_LR, CYCLE_MAX_LR, DECAY_LR_RATE = "cycle_min_lr", "cycle_max_lr", "decay_lr_rate"
CYCLE_FIRST_STEP_SIZE, CYCLE_SECOND_STEP_SIZE = "cycle_first_step_size", "cycle_second_step_size"
CYCLE_FIRST_STAIR_COUNT, CYCLE_SECOND_STAIR_COUNT = "cycle_first_stair_count", "cycle_second_stair_count"
DECAY_STEP_SIZE, DECAY_MOM_RATE = "decay_step_size", "decay_mom_rate"
CYCLE_MIN_MOM, CYCLE_MAX_MOM = "cycle_min_mom", "cycle_max_mom"
WARMUP_MIN_LR, WARMUP_MAX_LR = "warmup_min_lr", "warmup_max_lr"
WARMUP_NUM_STEPS, WARMUP_TYPE, TOTAL_NUM_STEPS = "warmup_num_steps", "warmup_type", "total_num_steps"
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"
WARMUP_MIN_RATIO, COS_MIN_RATIO = "warmup_min_ratio", "cos_min_ratio"

UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
OPTIMIZER_STATE_DICT, BASE_OPTIMIZER_STATE = "optimizer_state_dict", "base_optimizer_state"
FP32_FLAT_GROUPS, SINGLE_PARTITION_OF_FP32_GROUPS = "fp32_flat_groups", "single_partition_of_fp32_groups"
ZERO_STAGE, PARAM_SHAPES, BUFFER_NAMES, DS_VERSION = "zero_stage", "param_shapes", "buffer_names", "ds_version"
MIN_SWAPPABLE_BYTES = 1 << 20

logger = logging.getLogger("DeepSpeed")
torch_info: dict[str, Any] = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": True,
    "cuda_version": "0.0",  # unknown: asked of torch where it matters
    "nccl_version": "0.0",
    "hip_version": "0.0",
}


class ZeroStageEnum(int, enum.Enum):
    """The stages by name."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3  # noqa: PIE796  # an alias


class OffloadDeviceEnum(enum.StrEnum):
    """Where offloaded states rest."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(enum.StrEnum):
    """Kinds of states that `engine.offload_states` names."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on some ranks; -1, or none given, means all."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


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
