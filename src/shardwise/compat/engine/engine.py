"""`DeepSpeedEngine`: the methods of DeepSpeed's engine, each a call to shardwise's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.compat.engine.clients import (
    save_what_is_written,
    saved_from_model,
    saved_though_frozen,
    unwrap_in_trainers,
)
from shardwise.compat.engine.facts import EngineFacts
from shardwise.compat.engine.gradients import UnusedParameters, with_gradients_changed
from shardwise.compat.standalone.monitors import MonitorMaster
from shardwise.compat.standalone.settings import OffloadDeviceEnum, OffloadStateTypeEnum, get_monitor_config
from shardwise.compat.standalone.utils import ROUTE_EVAL, ROUTE_PREDICT, ROUTE_TRAIN, ThroughputTimer
from shardwise.compat.zero.parameters import (
    EarlyShard,
    close_opened,
    early_device,
    mark_module,
    note_units,
    put_back,
)
from shardwise.errors import CompatibilityError

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine


class DeepSpeedEngine(EngineFacts, nn.Module):
    """A model under ZeRO, with DeepSpeed's methods. The engine that does the work is `shardwise_engine`."""

    shardwise_engine: Engine

    def __init__(self, engine: Engine, settings: dict[str, Any], stage: int, dtypes: dict[str, torch.dtype]) -> None:
        super().__init__()
        self.module = engine.module
        vars(self)["shardwise_engine"] = engine  # not a submodule: the names of parameters stay those of `module`
        self._settings = settings
        self._stage = stage
        self._dtypes = dtypes  # in which the model was built, by parameter
        self.optimizer: Any = None
        self.basic_optimizer = engine.optimizer
        self.training_dataloader: Any = None
        self.client_lr_scheduler: Any = None
        self.client_optimizer: Any = None
        self.collate_fn: Any = None
        self.mpu: Any = None
        self.is_compiled = False
        self.micro_steps = 0
        self.tput_timer = ThroughputTimer()
        self.monitor = MonitorMaster(get_monitor_config(settings))
        self._monitored_loss: torch.Tensor | None = None  # of the micro-batches of the step so far
        self.loss_total = 0.0
        self._unused = UnusedParameters.of(self.module, settings, stage)
        self.inside_no_sync_ctxt = False
        self._is_in_backward = False
        self._has_updated = False
        self._is_destroyed = False
        self._reload = contextlib.ExitStack()
        self._while_saving = contextlib.ExitStack()  # from a consolidated state_dict to the next forward
        self._is_gathered_elsewhere = False

    # The loop

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_destroyed:
            raise CompatibilityError(
                "this engine was destroyed, as accelerator.free_memory() does: call accelerator.prepare(...) or "
                "deepspeed.initialize(model=engine.module, ...) again"
            )
        self._end_saving()
        outputs = self.shardwise_engine(*args, **kwargs)
        if self.gradient_accumulation_steps() == 1 or not torch.is_grad_enabled():
            return outputs
        return with_gradients_changed(outputs, self._divided)

    def _divided(self, grad: torch.Tensor) -> torch.Tensor:
        """A gradient that enters the model: a plain `loss.backward()` counts as one of the micro-batches of a step."""
        return grad if self._is_in_backward else grad / self.gradient_accumulation_steps()

    def scale(self, loss: torch.Tensor, retain_graph: bool = False) -> torch.Tensor:
        """The loss for a plain `.backward()`: in fp16 times the loss scale, else as it is."""
        _check_is_loss(loss, "scale")
        return self.shardwise_engine.scale(loss)

    def backward(
        self,
        loss: torch.Tensor,
        allreduce_gradients: bool = True,
        release_loss: bool = False,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        **further: Any,
    ) -> torch.Tensor:
        """Gradients of `loss`, divided by the number of micro-batches unless `scale_wrt_gas` is False; returns that."""
        self._check_has_optimizer("backward")
        _check_is_loss(loss, "backward")
        if not allreduce_gradients:
            raise CompatibilityError(
                "engine.backward(allreduce_gradients=False) leaves the reduction to another call: use engine.no_sync() "
                "around the micro-batches that are only added up"
            )
        count = self.gradient_accumulation_steps() if scale_wrt_gas else 1
        scaled = loss * (1.0 / count) if count > 1 else loss
        if self.monitor.enabled:
            self._monitored_loss = scaled.detach() + (0 if self._monitored_loss is None else self._monitored_loss)
        self._is_in_backward = True
        try:
            self.shardwise_engine.backward(scaled, scale=False, retain_graph=retain_graph)
        finally:
            self._is_in_backward = False
        return scaled

    def allreduce_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: backward reduces the gradients."""

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At the boundary of an accumulation: clip, update, step the schedule, drop the gradients."""
        self._check_has_optimizer("step")
        if self.inside_no_sync_ctxt:
            raise AssertionError("It is illegal to call Engine.step() inside no_sync context manager")
        if self._unused is not None and self.is_gradient_accumulation_boundary():
            self._unused.check()
        self._has_updated = self.is_gradient_accumulation_boundary()
        samples = self.global_samples
        self.shardwise_engine.step()
        self.micro_steps += 1
        if self.lr_scheduler is not None:
            # In fp16 the schedule steps when the outcome is known, and scripts read the rate right after a step.
            self.shardwise_engine.was_skipped  # noqa: B018  # waits for it
        if self.monitor.enabled and self._has_updated:
            self._write_events(samples)

    def _write_events(self, samples: int) -> None:
        """Write what DeepSpeed's engine writes of a step, the loss by the number of samples before it."""
        loss, self._monitored_loss = self._monitored_loss, None
        if self.global_rank != 0:
            return
        events = [] if loss is None else [("Train/Samples/train_loss", loss.item(), samples)]
        if rates := self.get_lr():
            events.append(("Train/Samples/lr", rates[0], self.global_samples))
        if self.fp16_enabled():
            events.append(("Train/Samples/loss_scale", self.loss_scale(), self.global_samples))
        self.monitor.write_events(events)

    def _check_has_optimizer(self, call: str) -> None:
        if self.basic_optimizer is None:
            raise AssertionError(f"must provide optimizer during init in order to use {call}: pass it to initialize")

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients of the coming `step()`, beside `gradient_clipping`; returns their norm. A collective."""
        return self.shardwise_engine.clip_grad_norm_(max_norm, norm_type)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Let the caller say whether the next `step()` updates."""
        self.shardwise_engine.set_boundary(is_boundary)

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.shardwise_engine.is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward adds up gradients; stages 0 and 1.

        It sends nothing if `gradient_accumulation_steps` is 1. Else every micro-batch is reduced, as under stage 2.
        """
        if self.zero_optimization_partition_gradients():
            raise AssertionError(
                "no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage "
                f"{self.zero_optimization_stage()}"
            )
        if self.inside_no_sync_ctxt:
            raise AssertionError("no_sync context manager reentry is unsupported")
        self.inside_no_sync_ctxt = True
        try:
            with self.shardwise_engine.no_sync():
                yield
        finally:
            self.inside_no_sync_ctxt = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.shardwise_engine.zero_grad()

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        super().train(mode)
        self.shardwise_engine.training = mode
        return self

    def compile(self, backend: Any = None, compile_kwargs: dict[str, Any] | None = None, **further: Any) -> None:
        """Compile the model's forward in place."""
        options = dict(compile_kwargs or {})
        if backend is not None:
            options["backend"] = backend
        self.module.compile(**options)
        self.is_compiled = True

    def destroy(self) -> None:
        """Take the engine off the model, which keeps its values: in shards under stage 3, else whole. A collective."""
        if self._is_destroyed or not torch.distributed.is_initialized():
            return
        from shardwise.partition.stored import stored_tensors

        self._is_destroyed = True
        self._end_saving()
        for param in self.module.parameters():
            close_opened(param)
        engine = self.shardwise_engine
        weights = engine.config.placement.weights
        device = early_device(weights.tier != "device")
        tensors = stored_tensors(self.module)
        kept: dict[str, torch.Tensor | EarlyShard] = {}
        for name in self._dtypes:
            value = engine.full_param(name).to(self._dtypes[name])
            # The tensors inside a quantised parameter have no early shards.
            is_early = weights.sharding != "replicated" and isinstance(tensors[name], nn.Parameter)
            kept[name] = EarlyShard(value, device) if is_early else value
        engine.destroy()
        for name, tensor in tensors.items():
            put_back(tensor, kept[name])
        unwrap_in_trainers(self)

    def offload_states(
        self,
        include: Iterable[OffloadStateTypeEnum | str] | None = None,
        device: OffloadDeviceEnum | str = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Between steps, move masters, optimizer states and sharded weights to the host, until `reload_states`."""
        for name in () if include is None else include:
            OffloadStateTypeEnum(name)
        if device != OffloadDeviceEnum.cpu:
            raise CompatibilityError(f"engine.offload_states(device={str(device)!r}): states move to 'cpu' alone")
        self.reload_states()
        self._reload.enter_context(self.shardwise_engine.offloaded())

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move back to the device what `offload_states` has moved."""
        self._reload.close()

    # Weights and checkpoints

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Always: whole weights are written under every stage."""
        return True

    zero_gather_fp16_weights_on_model_save = zero_gather_16bit_weights_on_model_save

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        """The model's whole weights in the precision that computes, on rank 0; None elsewhere. A collective."""
        from shardwise.compat.checkpoints import consolidated
        from shardwise.engine.access import gathered

        self._end_saving()
        self._while_saving.enter_context(gathered(saved_from_model(self.module)))
        frozen = saved_though_frozen(self.module)
        state = consolidated(self.module, self.global_rank == 0, exclude_frozen_parameters, frozen)
        self._is_gathered_elsewhere = state is None
        return state

    def _end_saving(self) -> None:
        self._while_saving.close()
        self._is_gathered_elsewhere = False

    def _was_gathered_elsewhere(self) -> bool:
        """Whether another rank has the state_dict of what this one is about to save: True once for each."""
        was, self._is_gathered_elsewhere = self._is_gathered_elsewhere, False
        return was

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        """The model's state_dict with whole values. A collective where weights are sharded."""
        state = self.module.state_dict(prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, param in self.module.named_parameters(prefix.rstrip("."), remove_duplicate=False):
                if not param.requires_grad:
                    state.pop(name, None)
        return state

    def load_module_state_dict(
        self, checkpoint: Any, strict: bool = True, custom_load_fn: Any = None, **details: Any
    ) -> None:
        """Load whole values into the model. A collective."""
        _refuse_custom_load(custom_load_fn)
        state = checkpoint.get("module", checkpoint) if isinstance(checkpoint, dict) else checkpoint
        self.shardwise_engine.load_state_dict(state, strict=strict)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the whole weights, in the precision that computes, with torch.save. A collective."""
        from shardwise.compat.checkpoints import consolidated

        state = consolidated(self.module, self.global_rank == 0, exclude_frozen_parameters)
        if state is not None:
            os.makedirs(save_dir, exist_ok=True)
            torch.save(state, os.path.join(save_dir, save_filename))
        torch.distributed.barrier()
        return True

    save_fp16_model = save_16bit_model

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save what training needs to continue into `save_dir/<tag>`, and its name into `latest`. A collective.

        Without a tag it is `global_step<N>`. With `exclude_frozen_parameters`, a load keeps the model's own values of
        these.
        """
        from shardwise.compat.checkpoints import agreed_tag, save

        name = agreed_tag(str(tag or f"global_step{self.global_steps}"), self._setting("checkpoint", "tag_validation"))
        save(self.shardwise_engine, save_dir, name, client_state, save_latest, not exclude_frozen_parameters)
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Continue from a checkpoint, of any world size and stage; its path and client state. A collective.

        Without a tag, the one that `latest` names; without that, nothing is loaded, and the path is None.
        """
        from shardwise.compat import checkpoints

        _refuse_custom_load(custom_load_fn)
        if load_module_only or not load_optimizer_states:
            return checkpoints.load_weights(
                self.shardwise_engine, load_dir, tag, load_module_strict, load_module_only, load_lr_scheduler_states
            )
        return checkpoints.load(self.shardwise_engine, load_dir, tag, load_lr_scheduler_states)

    def _get_optimizer_ckpt_name(self, checkpoints_path: str, tag: Any, *ranks: Any) -> str:
        """Where a checkpoint has the optimizer's states: beside everything else."""
        return os.path.join(checkpoints_path, str(tag))

    def empty_partition_cache(self) -> None:
        """Does nothing: units are released after their use."""

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = ROUTE_TRAIN,
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """A loader of this rank's part of a dataset: shuffled, but in its order on the routes "eval" and "predict"."""
        from torch.utils.data import DataLoader, DistributedSampler

        if data_sampler is None:
            shuffle = route not in (ROUTE_EVAL, ROUTE_PREDICT)
            data_sampler = DistributedSampler(dataset, self.world_size, self.global_rank, shuffle=shuffle)
        return DataLoader(
            dataset,
            batch_size=batch_size or self.train_micro_batch_size_per_gpu() or 1,
            sampler=data_sampler,
            collate_fn=collate_fn or self.collate_fn,
            num_workers=num_local_io_workers or 0,
            pin_memory=pin_memory and self.device.type == "cuda",
            drop_last=bool(self._settings.get("dataloader_drop_last", False)),
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "lr_scheduler":
            self.shardwise_engine.lr_scheduler = value
        else:
            super().__setattr__(name, value)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                if name in ("module", "shardwise_engine"):
                    raise
            try:
                return getattr(self.module, name)
            except AttributeError:
                if (answer := self._configured(name)) is not None:
                    return answer
                raise AttributeError(
                    f"{type(self.module).__name__} has no attribute {name!r}, and neither has DeepSpeedEngine as "
                    "shardwise serves it: docs/from-deepspeed.md says what to use instead"
                ) from None


def _check_is_loss(loss: Any, call: str) -> None:
    if not isinstance(loss, torch.Tensor):
        raise AssertionError(f"{call}() takes a scalar tensor, not a {type(loss).__name__}: pass the model's loss")
    if loss.numel() != 1:
        raise AssertionError(
            f"{call}() takes a scalar tensor, not one of shape {tuple(loss.shape)}: reduce it by .mean() or .sum()"
        )
    if not loss.requires_grad:
        raise AssertionError(
            f"{call}() takes a scalar tensor that requires a gradient: this one was detached, or made under no_grad"
        )


def _refuse_custom_load(function: Any) -> None:
    if function is not None:
        raise CompatibilityError("custom_load_fn is not supported: load into engine.module, within GatheredParameters")


_ADAPTED = "_deepspeed_engine"


def release(model: nn.Module) -> bool:
    """Destroy the engines that have parameters of a model; whether there was one. A collective."""
    from shardwise.compat.zero.fragments import engine_of

    found = [vars(engine)[_ADAPTED] for param in model.parameters() if (engine := engine_of(param)) is not None]
    alive = [adapted for adapted in dict.fromkeys(found) if not adapted._is_destroyed]
    for adapted in alive:
        adapted.destroy()
    return bool(alive)


def adapt(engine: Engine, settings: dict[str, Any], stage: int, dtypes: dict[str, torch.dtype]) -> DeepSpeedEngine:
    """The engine with DeepSpeed's methods."""
    from shardwise.compat.zero.fragments import register

    adapted = DeepSpeedEngine(engine, settings, stage, dtypes)
    vars(engine)[_ADAPTED] = adapted
    register(engine)
    if adapted.zero_optimization_stage() == 3:
        mark_module(engine.module)
        note_units(engine.units)
        if (save := getattr(engine.module, "save_pretrained", None)) is not None:
            wrapped = partial(save_what_is_written, save, adapted._was_gathered_elsewhere)
            vars(engine.module)["save_pretrained"] = wrapped
    return adapted
