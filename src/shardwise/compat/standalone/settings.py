"""DeepSpeed's configuration as objects: `DeepSpeedConfig` and its sections, with DeepSpeed's names and defaults.

Programs read them. The engine does not: `initialize` translates the configuration itself.
"""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, model_validator

from shardwise.config.files import read_file, read_text, text_of
from shardwise.config.sections import Batch
from shardwise.errors import ConfigError

ADAM_OPTIMIZER, ADAMW_OPTIMIZER = "adam", "adamw"
ADAGRAD_OPTIMIZER, LION_OPTIMIZER = "adagrad", "lion"
_STAGE_3 = "stage3_"
KEYS: dict[str, Any] = {
    "communication_data_type": None,
    "dataloader_drop_last": False,
    "dump_state": False,
    "gradient_clipping": 0.0,
    "gradient_predivide_factor": 1.0,
    "log_level": None,
    "memory_breakdown": False,
    "prescale_gradients": False,
    "steps_per_print": 10,
    "wall_clock_breakdown": False,
    "zero_allow_untested_optimizer": False,
    "zero_force_ds_cpu_optimizer": True,
}
"""Attributes of `DeepSpeedConfig` that are keys of the top level, and their values without one."""
SWITCHES = {
    "amp_enabled": "amp",
    "curriculum_enabled_legacy": "curriculum_learning",
    "data_efficiency_enabled": "data_efficiency",
    "eigenvalue_enabled": "eigenvalue",
    "elasticity_enabled": "elasticity",
    "pld_enabled": "progressive_layer_drop",
    "torch_autocast_enabled": "torch_autocast",
}
"""Attributes of `DeepSpeedConfig` that say whether a section is switched on."""
_BATCH_KEYS = {
    "global_batch_size": "train_batch_size",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "accumulation": "gradient_accumulation_steps",
}


class DeepSpeedConfigError(ConfigError, AssertionError):
    """A configuration that cannot be used. Programs catch DeepSpeed's errors of both kinds, by the key."""


@contextmanager
def deepspeed_errors() -> Iterator[None]:
    """Within it, an invalid configuration is a DeepSpeedConfigError."""
    try:
        yield
    except ConfigError as error:
        raise DeepSpeedConfigError(*error.args).with_traceback(error.__traceback__) from None


class DeepSpeedConfigModel(BaseModel):
    """A section. A key that is "auto" has its default; unknown ones are errors, in classes that users derive.

    Of a field whose `json_schema_extra` says `deprecated`, the value also goes to its `new_param`.
    """

    model_config = ConfigDict(extra="forbid", validate_default=True, populate_by_name=True)

    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(**data)
        for name in sorted(self.model_fields_set):
            self._follow_new_name(name)

    def _follow_new_name(self, name: str) -> None:
        field = type(self).model_fields.get(name)
        details = field.json_schema_extra if field is not None else None
        if not isinstance(details, dict) or not details.get("deprecated") or not details.get("set_new_param", True):
            return
        new, convert = details.get("new_param"), details.get("new_param_fn")
        if not isinstance(new, str) or not new:
            return
        if new in self.model_fields_set:
            raise AssertionError(f"{name} is the deprecated name of {new}: give one of the two")
        value = getattr(self, name)
        setattr(self, new, convert(value) if callable(convert) else value)

    @model_validator(mode="before")
    @classmethod
    def _drop_auto(cls, data: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in data.items() if value != "auto"}


class OwnSection(DeepSpeedConfigModel):
    """A section of DeepSpeed's. Keys without a field become attributes as they are."""

    model_config = ConfigDict(extra="allow")


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


class DeepSpeedZeroOffloadParamConfig(OwnSection):
    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    nvme_path: Path | None = None
    buffer_count: int = Field(5, ge=0)
    buffer_size: float = Field(1e8, ge=0)
    max_in_cpu: float = Field(1e9, ge=0)
    pin_memory: bool = False


class DeepSpeedZeroOffloadOptimizerConfig(OwnSection):
    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    nvme_path: Path | None = None
    buffer_count: int = Field(4, ge=0)
    pin_memory: bool = False
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: float = Field(1.0, ge=0, le=1)

    @property
    def pipeline(self) -> bool:
        return self.pipeline_read or self.pipeline_write


class DeepSpeedZeroConfig(OwnSection):
    """The section `zero_optimization`; its keys are given with or without `stage3_`."""

    stage: ZeroStageEnum = ZeroStageEnum.disabled
    offload_param: DeepSpeedZeroOffloadParamConfig | None = None
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = None
    overlap_comm: bool | None = None
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: float = Field(5e8, gt=0)
    allgather_partitions: bool = True
    allgather_bucket_size: float = Field(5e8, ge=0)
    sub_group_size: float = Field(1e9, ge=0)
    prefetch_bucket_size: float = Field(5e7, ge=0)
    param_persistence_threshold: float = Field(1e5, ge=0)
    model_persistence_threshold: float = Field(sys.maxsize, ge=0)
    max_live_parameters: float = Field(1e9, ge=0)
    max_reuse_distance: float = Field(1e9, ge=0)
    gather_16bit_weights_on_model_save: bool = False
    module_granularity_threshold: float = 0
    adaptive_prefetch_bucket_size: bool = False
    adaptive_prefetch_min_size: float = 1e7
    adaptive_prefetch_max_size: float = 5e8
    elastic_checkpoint: bool = False
    load_from_fp32_weights: bool = True
    ignore_unused_parameters: bool = True
    round_robin_gradients: bool = False
    pipeline_loading_checkpoint: bool = False
    memory_efficient_linear: bool = True
    zero_hpz_partition_size: int = Field(1, ge=0)
    zero_quantized_weights: bool = False
    zero_quantized_gradients: bool = False
    mics_shard_size: int = -1

    @model_validator(mode="before")
    @classmethod
    def _current_names(cls, data: dict[str, Any]) -> dict[str, Any]:
        named = {key.removeprefix(_STAGE_3): value for key, value in data.items()}
        if "gather_fp16_weights_on_model_save" in named:
            named["gather_16bit_weights_on_model_save"] = named.pop("gather_fp16_weights_on_model_save")
        pins = named.pop("cpu_offload_use_pin_memory", False)
        for old, new in (("cpu_offload_param", "offload_param"), ("cpu_offload", "offload_optimizer")):
            if named.pop(old, False):
                named.setdefault(new, {"device": "cpu", "pin_memory": pins})
        return named

    @model_validator(mode="after")
    def _overlap_by_stage(self) -> DeepSpeedZeroConfig:
        if self.overlap_comm is None:
            self.overlap_comm = self.stage == ZeroStageEnum.weights
        return self


class DeepSpeedFP16Config(OwnSection):
    enabled: bool = False
    auto_cast: bool = False
    loss_scale: float = Field(0, ge=0, allow_inf_nan=False)
    initial_scale_power: int = Field(16, ge=0)
    loss_scale_window: int = Field(1000, ge=0)
    hysteresis: int = Field(2, ge=0)
    consecutive_hysteresis: bool = False
    min_loss_scale: float = Field(1, ge=0)
    fp16_master_weights_and_grads: bool = False


class DeepSpeedBF16Config(OwnSection):
    enabled: bool = False
    immediate_grad_update: bool = False
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class TensorBoardConfig(OwnSection):
    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


class CSVConfig(TensorBoardConfig):
    """The same for files of comma-separated values."""


class WandbConfig(OwnSection):
    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


class CometConfig(OwnSection):
    enabled: bool = False
    samples_log_interval: int = 100
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = None
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: str | None = None


class TrackioConfig(OwnSection):
    enabled: bool = False
    project: str = "deepspeed"


class DeepSpeedMonitorConfig(OwnSection):
    """The sections of all monitors."""

    tensorboard: TensorBoardConfig = Field(default_factory=TensorBoardConfig)
    comet: CometConfig = Field(default_factory=CometConfig)
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    csv_monitor: CSVConfig = Field(default_factory=CSVConfig)
    trackio: TrackioConfig = Field(default_factory=TrackioConfig)

    @property
    def enabled(self) -> bool:
        return any(getattr(self, name).enabled for name in MONITORS)


MONITORS = tuple(DeepSpeedMonitorConfig.model_fields)


def get_monitor_config(param_dict: dict[str, Any]) -> DeepSpeedMonitorConfig:
    return DeepSpeedMonitorConfig.model_validate({name: param_dict.get(name) or {} for name in MONITORS})


def get_float16_config(settings: dict[str, Any]) -> DeepSpeedFP16Config:
    return DeepSpeedFP16Config(**(settings.get("fp16") or {}))


def get_bfloat16_config(settings: dict[str, Any]) -> DeepSpeedBF16Config:
    return DeepSpeedBF16Config(**(settings.get("bf16") or settings.get("bfloat16") or {}))


def get_fp16_enabled(settings: dict[str, Any]) -> bool:
    return get_float16_config(settings).enabled


def get_bfloat16_enabled(settings: dict[str, Any]) -> bool:
    return get_bfloat16_config(settings).enabled


def read_settings(config: Any) -> dict[str, Any]:
    """A configuration as DeepSpeed's dictionary, from a dictionary, a path or JSON text, also in base64."""
    if isinstance(config, str) and (text := text_of(config)):
        config = read_text(text, "JSON text")
    elif isinstance(config, str | os.PathLike):
        if not Path(config).is_file():
            raise ConfigError(f"{config}: no such file")
        config = read_file(Path(config))
    if not isinstance(config, dict):
        raise ConfigError(f"config is {type(config).__name__}: pass a dictionary, a path or JSON text")
    return config


class DeepSpeedConfig:
    """A configuration, from a dictionary, a path or JSON text, with the batch sizes for the ranks that there are."""

    @deepspeed_errors()
    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        settings = read_settings(config)
        self._param_dict = settings
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.train_batch_size = settings.get("train_batch_size")
        self.train_micro_batch_size_per_gpu = settings.get("train_micro_batch_size_per_gpu")
        self.gradient_accumulation_steps = settings.get("gradient_accumulation_steps")
        self._configure_train_batch_size()
        self.zero_config = DeepSpeedZeroConfig(**(settings.get("zero_optimization") or {}))
        self.zero_optimization_stage = self.zero_config.stage
        self.zero_enabled = self.zero_optimization_stage > 0
        self.float16_config, self.bfloat16_config = get_float16_config(settings), get_bfloat16_config(settings)
        self.fp16_enabled, self.bfloat16_enabled = self.float16_config.enabled, self.bfloat16_config.enabled
        for key, value in KEYS.items():
            setattr(self, key, settings.get(key, value))
        for name, section in SWITCHES.items():
            setattr(self, name, bool((settings.get(section) or {}).get("enabled", False)))
        self.monitor_config = get_monitor_config(settings)
        optimizer, scheduler = settings.get("optimizer") or {}, settings.get("scheduler") or {}
        self.optimizer_name, self.optimizer_params = optimizer.get("type"), optimizer.get("params")
        self.scheduler_name, self.scheduler_params = scheduler.get("type"), scheduler.get("params")

    def _configure_train_batch_size(self) -> None:
        """Complete the three sizes of a batch; an AssertionError if they do not multiply."""
        given = {ours: size for ours, key in _BATCH_KEYS.items() if (size := getattr(self, key)) not in (None, "auto")}
        if not given.keys() & {"global_batch_size", "micro_batch_size"}:
            raise AssertionError("Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided")
        try:
            batch = Batch(**given).resolve(self.world_size)
        except (ConfigError, ValueError) as error:
            raise AssertionError(f"Check batch related parameters: {error}") from error
        for ours, key in _BATCH_KEYS.items():
            setattr(self, key, getattr(batch, ours))
