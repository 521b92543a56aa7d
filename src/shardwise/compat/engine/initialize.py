"""`deepspeed.initialize`: arguments and configuration in DeepSpeed's form, an engine of shardwise's."""

from __future__ import annotations

import copy
import logging
from argparse import ArgumentParser
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise._version import __version__
from shardwise.compat.engine.clients import check_client_counts_all_ranks
from shardwise.compat.engine.engine import DeepSpeedEngine, adapt, release
from shardwise.compat.engine.optimizer import OPTIMIZERS
from shardwise.compat.standalone.accelerator import get_accelerator
from shardwise.compat.standalone.comm import init_distributed
from shardwise.compat.standalone.ops import with_adam_mode
from shardwise.compat.standalone.settings import MONITORS, deepspeed_errors
from shardwise.compat.standalone.utils import set_log_level_from_string
from shardwise.compat.zero.parameters import early_device, hand_over, is_early, mark_module, shard_early
from shardwise.errors import CompatibilityError

if TYPE_CHECKING:
    from shardwise.config import Config

DeepSpeedOptimizerCallable = Callable[[Iterable[Any]], torch.optim.Optimizer]
DeepSpeedSchedulerCallable = Callable[[torch.optim.Optimizer], Any]
"""What `initialize` takes as `optimizer` and `lr_scheduler`, beside instances."""

_said: set[str] = set()
_LEAST_BUCKET = 1 << 16  # elements
_FOLLOWED_HERE = ("dataloader_drop_last", "log_level")  # by the loader of `training_data`, and by DeepSpeed's logger


@deepspeed_errors()
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], Any] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """The engine, its optimizer, a loader of `training_data` if given, and the learning-rate schedule."""
    if not isinstance(model, nn.Module):
        given = "none is given" if model is None else f"model is a {type(model).__name__}"
        raise AssertionError(f"deepspeed.initialize requires a model, a torch.nn.Module: {given}")
    _refuse_parallelism(mpu, mesh_param, model)
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    check_client_counts_all_ranks()
    settings, parsed = read_config(config if config is not None else config_params, args)
    if settings.get("log_level") is not None:
        set_log_level_from_string(settings["log_level"])
    _say_who_serves(parsed)
    stage, weights = _stage(parsed), parsed.placement.weights
    is_stage_3 = stage == 3
    parsed = _in_one_order(parsed)
    _make_folders(parsed)
    if release(model):
        _say_once("the model was under an engine, which is destroyed: a model has one engine at a time")
    groups = list(model_parameters) if model_parameters is not None else []
    _check_scheduler(lr_scheduler, optimizer)
    _check_tested(optimizer, settings)
    _freeze_others(model, optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else groups)
    dtypes = _prepare(model, is_stage_3, is_offloaded=weights.tier != "device")
    from shardwise.engine.initialize import initialize as shard

    engine = shard(
        model,
        _optimizer(optimizer, groups, parsed),
        parsed.model_copy(update={"optimizer": None, "scheduler": None}),
        lr_scheduler=_scheduler(lr_scheduler, parsed),
    )
    adapted = adapt(engine, settings, stage, dtypes)
    if engine.optimizer is not None:
        is_plain = parsed.placement.optim.sharding == "replicated" and parsed.precision.compute == "fp32"
        adapted.optimizer = engine.optimizer if is_plain else OPTIMIZERS[stage](engine, engine.optimizer)
    adapted.client_optimizer, adapted.collate_fn, adapted.mpu = optimizer, collate_fn, mpu
    if training_data is not None:
        adapted.training_dataloader = adapted.deepspeed_io(training_data, collate_fn=collate_fn)
    return adapted, adapted.optimizer, adapted.training_dataloader, engine.lr_scheduler


def read_config(config: Any, args: Any = None) -> tuple[dict[str, Any], Config]:
    """A configuration as DeepSpeed's dictionary and as shardwise's object."""
    from shardwise.compat.standalone.settings import read_settings
    from shardwise.config import Config

    named = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    if None not in (named, config):
        raise AssertionError("initialize(config=...) and args.deepspeed_config are both given: pass one of the two")
    config = named if config is None else config
    if config is None:
        raise AssertionError("DeepSpeed requires --deepspeed_config to specify configuration file")
    config = read_settings(config)
    settings = _without_tiny_buckets(_without_idle_sections(copy.deepcopy(config)))
    return config, Config.load(settings or {"zero_optimization": {"stage": 0}})


def _stage(config: Config) -> int:
    placement = config.placement
    return sum(kind.sharding != "replicated" for kind in (placement.optim, placement.grads, placement.weights))


def _in_one_order(config: Config) -> Config:
    """The same configuration with gradients that are reduced for every micro-batch, where a step has several.

    Under stages 0 and 1, DeepSpeed reduces once a step. That rounds differently from stages 2 and 3; here all stages
    give the same bits (tests/clients/test_trainer.py).
    """
    from shardwise.config.presets import offloaded
    from shardwise.config.sections import KindPlacement

    row = config.placement
    if config.for_world_size(torch.distributed.get_world_size()).batch.accumulation == 1:
        return config
    sharded = row.model_copy(update={"grads": KindPlacement(sharding="sharded")})
    return config.with_sections(placement=offloaded(sharded, weights=row.weights.tier, optim=row.optim.tier))


def _make_folders(config: Config) -> None:
    """Make the folders for states on disk, as DeepSpeed does."""
    for folder in (config.offload.nvme_path, config.offload.weights_nvme_path):
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)


def _without_tiny_buckets(settings: dict[str, Any]) -> dict[str, Any]:
    """The same settings with buckets of some size: DeepSpeed's hold at least one parameter, and the engine cuts
    gradients into pieces of any size, which takes a message for each."""
    zero = settings.get("zero_optimization")
    if isinstance(zero, dict):
        size = zero.get("reduce_bucket_size")
        if isinstance(size, int | float) and 0 < size < _LEAST_BUCKET:
            zero["reduce_bucket_size"] = _LEAST_BUCKET
    return settings


def _without_idle_sections(settings: dict[str, Any]) -> dict[str, Any]:
    """The same settings without those that do nothing in DeepSpeed: offload sections that the stage has no use for, and
    the tier of saved activations where the model's own code decides what is saved; without those of monitors, which
    `DeepSpeedEngine` follows."""
    for monitor in MONITORS:
        settings.pop(monitor, None)
    zero = settings.get("zero_optimization")
    if isinstance(zero, dict):
        stage = zero.get("stage", 0)
        for key, needed in (("offload_param", 3), ("offload_optimizer", 1)):
            section = zero.get(key)
            if isinstance(section, dict) and section.get("device") not in (None, "none") and stage in range(needed):
                _say_once(f"zero_optimization.{key} has no effect at stage {stage}, as in DeepSpeed")
                del zero[key]
    optimizer = settings.get("optimizer")
    if isinstance(optimizer, dict):
        optimizer.pop("torch_adam", None)  # a key of `optimizer.params`; here, DeepSpeed does not look for it
    saved, own = settings.get("activation_checkpointing"), settings.get("shardwise")
    is_enabled = isinstance(own, dict) and own.get("checkpointing")
    if isinstance(saved, dict) and saved.get("cpu_checkpointing") and not is_enabled:
        _say_once(
            "activation_checkpointing.cpu_checkpointing has no effect on activations that the model's own code saves; "
            'with "shardwise": {"checkpointing": true}, the engine saves them on the host'
        )
        del saved["cpu_checkpointing"]
    return settings


def _refuse_parallelism(mpu: Any, mesh_param: Any, model: nn.Module) -> None:
    if mpu is not None:
        sizes = [getattr(mpu, f"get_{kind}_world_size", None) for kind in ("model_parallel", "tensor_model_parallel")]
        if any(size is not None and size() > 1 for size in sizes):
            raise CompatibilityError("deepspeed.initialize(mpu=...) asks for model parallelism: shard the data alone")
    if mesh_param is not None:
        raise CompatibilityError("deepspeed.initialize(mesh_param=...) asks for sequence parallelism: leave it out")


def _check_scheduler(lr_scheduler: Any, optimizer: Any) -> None:
    is_instance = isinstance(lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
    if is_instance and not isinstance(optimizer, torch.optim.Optimizer):
        raise AssertionError(
            "lr_scheduler is an instance on another optimizer: pass that optimizer as well, or a callable that takes "
            "the optimizer and returns the scheduler"
        )


def _check_tested(optimizer: Any, settings: dict[str, Any]) -> None:
    """Where a configuration says that only DeepSpeed's and torch's optimizers may run on shards, others may not."""
    is_own = isinstance(optimizer, torch.optim.Optimizer) and not type(optimizer).__module__.startswith(
        ("torch.optim", "shardwise.config")
    )
    if is_own and settings.get("zero_allow_untested_optimizer") is False and settings.get("zero_optimization"):
        raise AssertionError(
            f"zero_allow_untested_optimizer is false, and {type(optimizer).__name__} is not one of torch's: set it to "
            "true, or leave it out; an optimizer that needs whole tensors gets them"
        )


def _freeze_others(model: nn.Module, groups: list[Any]) -> None:
    """Freeze the parameters that are in none of the optimizer's groups, which DeepSpeed never updates."""
    members = [group["params"] if isinstance(group, dict) else group for group in groups]
    listed = [[member] if isinstance(member, torch.Tensor) else list(member) for member in members]
    held = {id(param) for params in listed for param in params}
    others = {name: param for name, param in model.named_parameters() if param.requires_grad and id(param) not in held}
    if not held or not others:
        return
    for param in others.values():
        param.requires_grad_(False)
    first = next(iter(others))
    _say_once(f"{len(others)} parameters are in no group of the optimizer, and are frozen; the first is {first!r}")


def _prepare(model: nn.Module, is_stage_3: bool, is_offloaded: bool) -> dict[str, torch.dtype]:
    """Put the model where it trains; returns the dtypes that it was built in, by parameter. A collective."""
    from shardwise.partition.dtensors import is_dtensor
    from shardwise.partition.stored import is_wrapper, stored_tensors

    device = torch.device(get_accelerator().current_device_name())
    dtypes = {name: tensor.dtype for name, tensor in stored_tensors(model).items()}
    if not is_stage_3:
        _make_whole(model)
        model.to(device)
        return dtypes
    for name, param in model.named_parameters():
        if is_wrapper(param) or is_dtensor(param):
            raise CompatibilityError(
                f"parameter {name!r} is a {type(param).__name__}, which cannot have the attributes of DeepSpeed's "
                "stage 3: take stage 2, or shardwise.initialize, whose zero3 serves it"
            )
    mark_module(model)
    params = list(model.parameters())
    # A model on another device goes over parameter by parameter, and only its shards.
    if any(is_early(param) or param.device != device for param in params):
        for param in params:
            shard_early(param, early_device(is_offloaded))
            hand_over(param, device)
        for buffer_name, buffer in list(model.named_buffers(remove_duplicate=False)):
            owner, _, own_name = buffer_name.rpartition(".")
            model.get_submodule(owner)._buffers[own_name] = buffer.to(device)
    return dtypes


def _make_whole(model: nn.Module) -> None:
    """Give parameters that were built under `zero.Init` their whole values."""
    for param in model.parameters():
        if is_early(param):
            values = param.early.whole().view(param.early.shape).clone()  # type: ignore[attr-defined]  # a ZeroParameter
            param.early = None  # type: ignore[attr-defined]  # of our class
            param.data = values


def _optimizer(given: Any, groups: list[Any], config: Config) -> Any:
    if isinstance(given, torch.optim.Optimizer):
        _drop_states_of_shards(given)
        return given
    if given is not None and not callable(given):
        raise AssertionError(
            f"optimizer is a {type(given).__name__}: pass an optimizer of torch's kind, or a callable that takes the "
            "parameters"
        )
    if callable(given):
        return (lambda params: given(groups)) if groups else given
    if config.optimizer is None:
        return None
    section = config.optimizer
    trainable = [group for group in groups if not isinstance(group, torch.Tensor) or group.requires_grad]
    return lambda params: with_adam_mode(section.build(trainable or params))


def _drop_states_of_shards(optimizer: torch.optim.Optimizer) -> None:
    """Remove what an optimizer made when it was built on empty parameters, under `zero.Init` (Adagrad's sums):
    it makes them again at its first step. Kernels would read past the end of such tensors."""
    for param, state in list(optimizer.state.items()):
        sizes = [value.numel() for value in state.values() if isinstance(value, torch.Tensor)]
        if param.numel() and 0 in sizes:
            del optimizer.state[param]


def _scheduler(given: Any, config: Config) -> Any:
    if given is not None or config.scheduler is None:
        return given
    from shardwise.compat.standalone.schedules import schedule_class

    section = config.scheduler
    return lambda optimizer: schedule_class(section.name)(optimizer, **section.params)


def _say_who_serves(config: Config) -> None:
    if torch.distributed.get_rank() == 0:
        weights, optim = config.placement.weights, config.placement.optim
        _say_once(
            f"shardwise {__version__} serves DeepSpeed's API (weights {weights}; optimizer states {optim}; "
            f"computes in {config.precision.compute})"
        )
        if idle := [name for key in config.idle_keys if (name := key.rpartition(".")[2]) not in _FOLLOWED_HERE]:
            names = ", ".join(idle)
            _say_once(f"of the configuration, these keys have no effect in shardwise: {names}")


def _say_once(sentence: str) -> None:
    if sentence not in _said:
        _said.add(sentence)
        logging.getLogger("DeepSpeed").warning("%s", sentence)


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config` to a parser of command-line arguments."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="Enable DeepSpeed.")
    group.add_argument("--deepspeed_config", default=None, type=str, help="DeepSpeed json configuration file.")
    group.add_argument("--deepscale", default=False, action="store_true", help="Deprecated name of --deepspeed.")
    group.add_argument("--deepscale_config", default=None, type=str, help="Deprecated name of --deepspeed_config.")
    return parser


add_core_arguments = add_config_arguments
