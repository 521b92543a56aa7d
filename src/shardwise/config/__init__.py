"""Configuration: small frozen models, and readers for presets, native files, DeepSpeed's JSON and Accelerate's YAML."""

from shardwise.config.config import Config
from shardwise.config.presets import PRESETS
from shardwise.config.sections import (
    Aio,
    Batch,
    BatchSizes,
    Checkpointing,
    Gradients,
    KindPlacement,
    LossScale,
    Offload,
    OptimizerSection,
    Placement,
    Precision,
    Runtime,
    SchedulerSection,
)

__all__ = [
    "PRESETS",
    "Aio",
    "Batch",
    "BatchSizes",
    "Checkpointing",
    "Config",
    "Gradients",
    "KindPlacement",
    "LossScale",
    "Offload",
    "OptimizerSection",
    "Placement",
    "Precision",
    "Runtime",
    "SchedulerSection",
]
