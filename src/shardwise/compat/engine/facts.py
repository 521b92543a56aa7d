"""What `DeepSpeedEngine` answers about itself: its settings, its place among the ranks, and how far it has come."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from shardwise.errors import CompatibilityError

if TYPE_CHECKING:
    from shardwise.compat.standalone.settings import DeepSpeedConfig
    from shardwise.config.sections import Batch
    from shardwise.engine.engine import Engine


class EngineFacts:
    """The part of `DeepSpeedEngine` that only reads; of the learning rate, also writes."""

    shardwise_engine: Engine
    basic_optimizer: Any
    _settings: dict[str, Any]
    _stage: int
    _has_updated: bool
    _earlier_samples = 0
    """By how much the samples so far differ from those of as many steps of today's size."""

    # What has one answer here
    has_moe_layers = pipeline_parallelism = False
    enable_backward_allreduce = gradient_average = True

    @property
    def config(self) -> dict[str, Any]:
        return self._settings

    @property
    def _config(self) -> DeepSpeedConfig:
        """The configuration as DeepSpeed's object, which scripts ask for the sizes of a batch."""
        from shardwise.compat.standalone.settings import DeepSpeedConfig

        each, count = self.train_micro_batch_size_per_gpu() or 1, self.gradient_accumulation_steps()
        sizes = {"train_micro_batch_size_per_gpu": each, "gradient_accumulation_steps": count}
        return DeepSpeedConfig(self._settings | sizes | {"train_batch_size": each * count * self.world_size})

    @property
    def global_steps(self) -> int:
        return self.shardwise_engine.steps

    @property
    def global_samples(self) -> int:
        return self._earlier_samples + self.global_steps * (self.train_batch_size() or 0)

    @property
    def skipped_steps(self) -> int:
        return self.shardwise_engine.skipped_steps

    @property
    def lr_scheduler(self) -> Any:
        return self.shardwise_engine.lr_scheduler

    @property
    def device(self) -> torch.device:
        return self.shardwise_engine.comm.device

    @property
    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", 0))

    @property
    def global_rank(self) -> int:
        return self.shardwise_engine.comm.rank

    @property
    def world_size(self) -> int:
        return self.shardwise_engine.comm.world_size

    dp_world_size = world_size

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        return set()

    def get_global_grad_norm(self) -> torch.Tensor | None:
        """The norm before clipping of the last step."""
        return self.shardwise_engine.grad_norm

    @property
    def _global_grad_norm(self) -> torch.Tensor | None:
        """The same, by the name that scripts read."""
        return self.shardwise_engine.grad_norm

    def train_batch_size(self) -> int | None:
        return self._batch.global_batch_size

    def train_micro_batch_size_per_gpu(self) -> int | None:
        return self._batch.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        return self._batch.accumulation

    @property
    def _batch(self) -> Batch:
        return self.shardwise_engine.config.batch

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples of a step, by the number of its micro-batches."""
        each = (self.train_micro_batch_size_per_gpu() or 1) * self.world_size
        if train_batch_size < each or train_batch_size % each:
            raise ValueError(
                f"set_train_batch_size({train_batch_size}): pass a multiple of {each}, a micro-batch of all ranks"
            )
        self._set_batch(train_batch_size // each, each // self.world_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of a micro-batch; a step has as many micro-batches as before."""
        self._set_batch(self.gradient_accumulation_steps(), micro_batch_size)

    def _set_batch(self, accumulation: int, micro_batch_size: int) -> None:
        from shardwise.config.sections import Batch

        engine = self.shardwise_engine
        if not engine.is_at_rest:
            raise CompatibilityError("the size of a step is changed between its micro-batches: change it after step()")
        batch = Batch(accumulation=accumulation, micro_batch_size=micro_batch_size).resolve(self.world_size)
        adds_up = accumulation > 1
        if engine.config.precision.compute != "fp32" and adds_up != (self.gradient_accumulation_steps() > 1):
            raise CompatibilityError(
                "the number of micro-batches decides in which dtype gradients are added up: initialize with "
                f"gradient_accumulation_steps {accumulation}"
            )
        samples = self.global_samples
        engine.set_batch(batch)
        self._earlier_samples += samples - self.global_samples

    def get_lr(self) -> list[float]:
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        return self._of_groups("betas") or self._of_groups("momentum")

    def _of_groups(self, key: str) -> list[Any]:
        groups = self.basic_optimizer.param_groups if self.basic_optimizer is not None else []
        return [group[key] for group in groups if key in group]

    def loss_scale(self) -> float:
        """What the next loss is multiplied with; 1.0 but in fp16."""
        return self.shardwise_engine.loss_scale

    def gradient_clipping(self) -> float:
        return self.shardwise_engine.config.gradients.clip_norm or 0.0

    def zero_optimization_stage(self) -> int:
        return self._stage

    def zero_optimization(self) -> bool:
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self.zero_optimization_stage() >= 3

    def fp16_enabled(self) -> bool:
        return self.shardwise_engine.config.precision.compute == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self.shardwise_engine.config.precision.compute == "bf16"

    def wall_clock_breakdown(self) -> bool:
        return self.shardwise_engine.config.runtime.timers

    def set_lr(self, lr: float) -> None:
        """Write the learning rate of all parameter groups; a schedule's next step overwrites it."""
        for group in self.basic_optimizer.param_groups:
            group["lr"] = lr

    def was_step_applied(self) -> bool:
        """Whether the last `step()` updated: at the boundary of an accumulation, and without an overflow."""
        return self._has_updated and not self.shardwise_engine.was_skipped

    def get_batch_info(self) -> tuple[int | None, int | None, int]:
        """The sizes of a step and of a micro-batch, and the micro-batches of a step."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def optimizer_name(self) -> str | None:
        """The `type` of the configuration's optimizer, in small letters."""
        name = self._setting("optimizer", "type")
        return None if name is None else str(name).lower()

    def scheduler_name(self) -> str | None:
        """The `type` of the configuration's schedule."""
        name = self._setting("scheduler", "type")
        return None if name is None else str(name)

    def optimizer_params(self) -> Any:
        return self._setting("optimizer", "params")

    def scheduler_params(self) -> Any:
        return self._setting("scheduler", "params")

    @property
    def param_names(self) -> dict[torch.Tensor, str]:
        """The names of the parameters."""
        return {param: name for name, param in self.shardwise_engine.module.named_parameters()}

    @property
    def dist_backend(self) -> str:
        return torch.distributed.get_backend()

    def dynamic_loss_scale(self) -> bool:
        return self.fp16_enabled() and self.shardwise_engine.config.precision.loss_scale.dynamic

    def zero_cpu_offload(self) -> bool:
        return self.shardwise_engine.config.placement.optim.tier == "host"

    @property
    def data_parallel_group(self) -> Any:
        return torch.distributed.group.WORLD

    @property
    def mp_world_size(self) -> int:
        """Of a model group: models are not cut here."""
        return 1

    def _setting(self, section: str, key: str) -> Any:
        found = self._settings.get(section)
        return found.get(key) if isinstance(found, dict) else None

    def _configured(self, name: str) -> Any:
        """A method that answers with a setting: of the top level, or `zero_<key>` of the section; None for others."""
        from shardwise.compat.standalone.settings import KEYS, SWITCHES, DeepSpeedZeroConfig

        if name in KEYS or name in SWITCHES:
            return lambda: getattr(self._config, name)
        keys = [key for key in (name, name.removeprefix("zero_")) if key in DeepSpeedZeroConfig.model_fields]
        if not name.startswith("zero_") or not keys:
            return None
        section = DeepSpeedZeroConfig(**(self._settings.get("zero_optimization") or {}))
        return lambda: getattr(section, keys[0])
