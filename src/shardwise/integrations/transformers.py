"""Transformers' Trainer on shardwise: `ShardwiseTrainer(..., shardwise="zero3")`.

The Trainer builds optimizer and schedule, counts micro-batches, divides losses and decides when to log, evaluate and
save. The engine takes the place in which other Trainers have DistributedDataParallel. A checkpoint holds what any
Trainer's holds, plain safetensors for `from_pretrained` among it, and a folder `shardwise` that training resumes from,
on any number of processes and in any stage.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from shardwise.compat.checkpoints import consolidated
from shardwise.compat.engine.clients import saved_from_model, saved_though_frozen
from shardwise.config import Config
from shardwise.config.sections import Precision
from shardwise.deferred.deferred import session_behind
from shardwise.engine.access import gathered
from shardwise.engine.engine import Engine
from shardwise.engine.initialize import initialize
from shardwise.errors import ConfigError
from shardwise.integrations.settings import with_settings

_FOLDER = "shardwise"  # in a checkpoint of the Trainer: what the engine resumes from
_SCHEDULER = "scheduler.pt"
_HOOKS = ("_wrap_model", "_clip_grad_norm", "_get_grad_norm", "_build_accelerator_args", "_load_best_model")


class ShardwiseTrainer(Trainer):
    """A Trainer whose model trains under a placement; arguments are those of Trainer, and `shardwise`.

    `shardwise` is a preset, a path, a dict or a `shardwise.Config`. `bf16` and `fp16` of the TrainingArguments set its
    precision (weights in 16 bits, fp32 master copies), `gradient_accumulation_steps` its accumulation. A model that was
    built under `shardwise.deferred_init()` gets its values when training starts, shard by shard.
    """

    optimizer: Any

    def __init__(self, *args: Any, shardwise: Any = "zero3", **kwargs: Any) -> None:
        self._config = Config.load(shardwise)
        self._engine: Engine | None = None
        if missing := [name for name in _HOOKS if not hasattr(Trainer, name)]:
            raise ConfigError(
                f"the Trainer of this transformers has no {missing[0]}: install transformers 5.22 or a later one of "
                "that series, or train through the DeepSpeed API (shardwise run --as-deepspeed)"
            )
        super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ConfigError(
                "TrainingArguments(deepspeed=...) and fsdp place the model themselves: leave them out with "
                "ShardwiseTrainer, or use Trainer"
            )

    @property
    def engine(self) -> Engine:
        """The engine, from the start of training on."""
        if self._engine is None:
            raise RuntimeError("ShardwiseTrainer has its engine once train() has begun")
        return self._engine

    # Building

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}  # the engine casts and scales

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.backward = self._backward
        unwrap = self.accelerator.unwrap_model
        # Trainer shifts labels by the class of the model that is inside.
        self.accelerator.unwrap_model = lambda model, *options, **named: unwrap(
            model.module if isinstance(model, Engine) else model, *options, **named
        )

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if session_behind(model) is None:  # otherwise it has no values to move
            super()._move_model_to_device(model, device)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if self._engine is not None and self._engine.module is self.model:
            return self._engine
        if not training:
            wrapped: nn.Module = super()._wrap_model(model, training, dataloader)
            return wrapped
        if self._engine is not None:  # model_init has made another model
            self._engine.destroy()
        self._engine = initialize(self.model, self.optimizer, self._config_here())
        self.optimizer = EngineOptimizer(self._engine)
        return self._engine

    def _config_here(self) -> Config:
        precision = said = None
        if self.args.bf16 or self.args.fp16:
            precision = Precision(compute="bf16" if self.args.bf16 else "fp16")
            said = f"TrainingArguments({precision.compute}=True)"
        return with_settings(self._config, precision, str(said), self.args.gradient_accumulation_steps)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        return super().create_scheduler(num_training_steps, optimizer or self.engine.optimizer)

    # A step

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        is_last = bool(self.accelerator.sync_gradients)
        self.engine.set_boundary(is_last)
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        if not is_last:
            self.engine.step()  # counts the micro-batch
        return loss

    def _backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self.engine.backward(loss, scale=False)  # Trainer has divided it

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return self.engine.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self.engine.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    # Checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole weights, as `from_pretrained` reads them; of a model with adapters those. A collective."""
        if self._engine is None:
            super().save_model(output_dir, _internal_call)
            return
        model, is_peft = self.model, hasattr(self.model, "peft_config")
        state = consolidated(model, self.args.should_save, is_peft, saved_though_frozen(model))
        with gathered(saved_from_model(model)):
            if state is not None:
                self._save(output_dir or self.args.output_dir, state_dict=state)
            self.accelerator.wait_for_everyone()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.engine.save(Path(output_dir) / _FOLDER, keep=1)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not (Path(resume_from_checkpoint) / _FOLDER).is_dir():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and (Path(checkpoint) / _FOLDER).is_dir():
            self.engine.load(Path(checkpoint) / _FOLDER)
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / _SCHEDULER, weights_only=True))

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint) / _FOLDER
        if best.is_dir():
            self.engine.load(best)
        else:
            super()._load_best_model()


class EngineOptimizer(torch.optim.Optimizer):
    """An engine's optimizer whose `step` is the engine's; accelerate takes it as prepared."""

    _is_accelerate_prepared = True

    def __init__(self, engine: Engine) -> None:
        self._engine = engine  # the base class is not initialized: groups and states are those of another optimizer

    @property
    def _inner(self) -> torch.optim.Optimizer:
        assert self._engine.optimizer is not None
        return self._engine.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # an attribute there
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]  # an attribute there
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # an attribute there
        return self._inner.defaults

    @property
    def step_was_skipped(self) -> bool:
        return self._engine.config.precision.compute == "fp16" and self._engine.was_skipped

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are refused
        self._engine.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._engine.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part."""
        return self._inner.state_dict()
