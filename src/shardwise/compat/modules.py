"""DeepSpeed's modules by their names: where the names in each come from, and what to use instead of the others.

`import deepspeed` finds one real file, path/deepspeed/__init__.py. The modules below it are rows of `SERVED`: a finder
makes them, and a name in one is imported from its module here when it is first read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any, NoReturn

from shardwise.errors import CompatibilityError

_ROOT = "deepspeed"
ALL = "*"
"""Every name of a module that has `__all__`."""


class Instead(str):
    """In place of a module here: what to use instead of names that are not served."""


_DATA_ALONE = "shard the data alone, with stage 3 for models that do not fit"
_STREAM = "shardwise.stream(model) generates with models that do not fit"
_PLAN = "`shardwise plan MODEL` predicts the memory of every stage"
_SEVERAL_MACHINES = "start torchrun on each machine, with --nnodes, --node-rank and --rdzv-endpoint"
_TORCHS = "use torch's own operators and optimizers"
_HYBRID = "engine.shardwise_engine.generate(...) keeps the weights gathered while it generates"
_NO_TILES = "stage 3 gathers one layer at a time; cut a layer that does not fit by hand"
_NO_INFERENCE = "pass no optimizer to deepspeed.initialize, and call engine.eval()"
_NO_MICS = "use zero.Init, and zero_hpz_partition_size for shards inside each node"

_PRECISION = "DeepSpeedFP16Config DeepSpeedBF16Config get_float16_config get_bfloat16_config"
_OFFLOAD = "DeepSpeedZeroOffloadParamConfig DeepSpeedZeroOffloadOptimizerConfig"
_ACCELERATOR = "get_accelerator is_current_accelerator_supported DeepSpeedAccelerator"
_EXTERNAL = "register_external_parameter unregister_external_parameter"
_LEAVES = (
    "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name "
    "set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module"
)
_RECOMPUTE = (
    "checkpoint configure is_configured reset non_reentrant_checkpoint get_cuda_rng_tracker "
    "model_parallel_cuda_manual_seed"
)
_ZERO = {
    "zero.zero": f"Init GatheredParameters unwrap_model_for_generation {_EXTERNAL}",
    "zero.parameters": "ZeroParamStatus ZeroParamType",
    Instead(_NO_MICS): "MiCS_Init",
    Instead(_NO_TILES): "TiledLinear",
}

SERVED: dict[str, dict[str, str]] = {
    "": {
        "engine.initialize": "initialize add_config_arguments add_core_arguments DeepSpeedOptimizerCallable "
        "DeepSpeedSchedulerCallable",
        "engine.engine": "DeepSpeedEngine",
        "engine.optimizer": "DeepSpeedOptimizer",
        "standalone.accelerator": "get_accelerator",
        "standalone.comm": "init_distributed",
        "standalone.settings": "ADAM_OPTIMIZER DeepSpeedConfig DeepSpeedConfigError",
        "standalone.utils": "OnDevice is_compile_supported log_dist logger",
        Instead(_DATA_ALONE): "PipelineModule PipelineEngine tp_model_init",
        Instead(_STREAM): "InferenceEngine",
        Instead(_HYBRID): "DeepSpeedHybridEngine",
        Instead(_NO_INFERENCE): "init_inference default_inference_config DeepSpeedInferenceConfig",
        Instead(_TORCHS): "DeepSpeedTransformerConfig DeepSpeedTransformerLayer replace_transformer_layer",
        Instead("a model's layers are never replaced"): "revert_transformer_layer",
    },
    "accelerator": {"standalone.accelerator": _ACCELERATOR},
    "accelerator.real_accelerator": {"standalone.accelerator": _ACCELERATOR},
    "checkpoint": {"checkpoints": "UNIVERSAL_CHECKPOINT_INFO"},
    "checkpoint.constants": {
        "checkpoints": "BASE_OPTIMIZER_STATE BUFFER_NAMES DS_VERSION FP32_FLAT_GROUPS OPTIMIZER_STATE_DICT "
        "PARAM_SHAPES SINGLE_PARTITION_OF_FP32_GROUPS UNIVERSAL_CHECKPOINT_INFO ZERO_STAGE"
    },
    "checkpoint.ds_to_universal": {"checkpoints": "main parse_arguments"},
    "checkpoint.utils": {"checkpoints": "clone_tensors_for_torch_save get_model_ckpt_name_for_rank"},
    "checkpointing": {"standalone.recompute": _RECOMPUTE},
    "comm": {"standalone.comm": ALL},
    "comm.comm": {"standalone.comm": ALL},
    "comm.torch": {"standalone.comm": "known_world_size"},
    "compression": {},
    "compression.helper": {"standalone.utils": "recursive_getattr recursive_setattr"},
    "git_version_info": {
        "activation": "version git_hash git_branch installed_ops compatible_ops",
        "standalone.utils": "torch_info",
    },
    "launcher": {},
    "launcher.multinode_runner": {
        Instead(_SEVERAL_MACHINES): "MultiNodeRunner PDSHRunner OpenMPIRunner MPICHRunner SlurmRunner"
    },
    "launcher.runner": {
        "launcher": "DEEPSPEED_ENVIRONMENT_NAME main fetch_hostfile _parse_hostfile parse_inclusion_exclusion "
        "parse_resource_filter"
    },
    "moe": {},
    "moe.utils": {
        "standalone.utils": "has_moe_layers is_moe_param split_params_into_different_moe_groups_for_optimizer"
    },
    "monitor": {},
    "monitor.comet": {"standalone.monitors": "CometMonitor"},
    "monitor.config": {
        "standalone.settings": "CometConfig CSVConfig DeepSpeedMonitorConfig TensorBoardConfig WandbConfig "
        "get_monitor_config"
    },
    "monitor.csv_monitor": {"standalone.monitors": "csvMonitor"},
    "monitor.monitor": {
        "standalone.monitors": "CometMonitor Monitor MonitorMaster TensorBoardMonitor WandbMonitor csvMonitor"
    },
    "monitor.tensorboard": {"standalone.monitors": "TensorBoardMonitor"},
    "monitor.trackio": {"standalone.monitors": "TrackioMonitor"},
    "monitor.wandb": {"standalone.monitors": "WandbMonitor"},
    "ops": {"standalone.ops": "__compatible_ops__"},
    "ops.adagrad": {"standalone.ops": "DeepSpeedCPUAdagrad"},
    "ops.adagrad.cpu_adagrad": {"standalone.ops": "DeepSpeedCPUAdagrad"},
    "ops.adam": {"standalone.ops": "DeepSpeedCPUAdam FusedAdam"},
    "ops.adam.cpu_adam": {"standalone.ops": "DeepSpeedCPUAdam"},
    "ops.adam.fused_adam": {"standalone.ops": "FusedAdam", Instead(_TORCHS): "multi_tensor_applier"},
    "ops.aio": {"standalone.ops": "AsyncIOBuilder"},
    "ops.lamb": {"standalone.ops": "FusedLamb"},
    "ops.lamb.fused_lamb": {"standalone.ops": "FusedLamb"},
    "ops.lion": {"standalone.ops": "DeepSpeedCPULion FusedLion"},
    "ops.lion.cpu_lion": {"standalone.ops": "DeepSpeedCPULion"},
    "ops.lion.fused_lion": {"standalone.ops": "FusedLion"},
    "ops.op_builder": {
        "standalone.ops": "OpBuilder AsyncIOBuilder CPUAdagradBuilder CPUAdamBuilder CPULionBuilder "
        "EvoformerAttnBuilder FPQuantizerBuilder FusedAdamBuilder FusedLambBuilder FusedLionBuilder GDSBuilder "
        "InferenceBuilder QuantizerBuilder RandomLTDBuilder SparseAttnBuilder SpatialInferenceBuilder "
        "StochasticTransformerBuilder TransformerBuilder UtilsBuilder"
    },
    "runtime": {},
    "runtime.activation_checkpointing": {},
    "runtime.activation_checkpointing.checkpointing": {"standalone.recompute": _RECOMPUTE},
    "runtime.bf16_optimizer": {"engine.optimizer": "BF16_Optimizer"},
    "runtime.base_optimizer": {"engine.optimizer": "DeepSpeedOptimizer ZeROOptimizer"},
    "runtime.compiler": {"standalone.utils": "is_compile_supported disable is_compiling"},
    "runtime.config_utils": {"standalone.settings": "DeepSpeedConfigModel"},
    "runtime.config": {
        "standalone.settings": "DeepSpeedConfig DeepSpeedConfigError get_bfloat16_enabled get_fp16_enabled "
        f"ADAGRAD_OPTIMIZER ADAM_OPTIMIZER ADAMW_OPTIMIZER LION_OPTIMIZER {_PRECISION}"
    },
    "runtime.constants": {
        "standalone.utils": "ROUTE_TRAIN ROUTE_EVAL ROUTE_PREDICT TRAIN_BATCH_SIZE TRAIN_MICRO_BATCH_SIZE_PER_GPU "
        "GRADIENT_ACCUMULATION_STEPS"
    },
    "runtime.dataloader": {"standalone.utils": "RepeatingLoader"},
    "runtime.data_pipeline": {},
    "runtime.data_pipeline.data_sampling": {},
    "runtime.data_pipeline.data_sampling.indexed_dataset": {
        Instead("read and write the samples by a torch Dataset"): "MMapIndexedDataset MMapIndexedDatasetBuilder"
    },
    "runtime.engine": {
        "engine.engine": "DeepSpeedEngine",
        "engine.initialize": "DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable",
    },
    "runtime.fp16": {},
    "runtime.fp16.fused_optimizer": {"engine.optimizer": "FP16_Optimizer"},
    "runtime.fp16.loss_scaler": {"engine.optimizer": "LossScaler DynamicLossScaler"},
    "runtime.fp16.unfused_optimizer": {"engine.optimizer": "FP16_UnfusedOptimizer"},
    "runtime.lr_schedules": {"standalone.schedules": ALL},
    "runtime.precision_config": {"standalone.settings": _PRECISION},
    "runtime.superoffload": {},
    "runtime.superoffload.superoffload_stage3": {
        Instead("offload_optimizer updates states on the device"): "SuperOffloadOptimizer_Stage3"
    },
    "runtime.swap_tensor": {"standalone.utils": "MIN_SWAPPABLE_BYTES"},
    "runtime.utils": {
        "standalone.accelerator": "empty_cache see_memory_usage",
        "standalone.utils": "call_to_str clip_grad_norm_ move_to_device required_torch_version set_random_seed",
    },
    "runtime.zero": _ZERO,
    "runtime.zero.config": {"standalone.settings": f"DeepSpeedZeroConfig ZeroStageEnum {_OFFLOAD}"},
    "runtime.zero.offload_config": {"standalone.settings": f"OffloadDeviceEnum OffloadStateTypeEnum {_OFFLOAD}"},
    "runtime.zero.parameter_offload": {"engine.clients": "DeepSpeedZeRoOffload"},
    "runtime.zero.partition_parameters": {
        "zero.zero": f"Init GatheredParameters {_EXTERNAL}",
        "zero.parameters": "MultipleAllGatherHandles ZeroParamStatus ZeroParamType is_zero_param "
        "partitioned_param_data_shape",
        Instead("weights are sent in the dtype that computes"): "CUDAQuantizer",
    },
    "runtime.zero.stage3": {
        "engine.optimizer": "DeepSpeedZeroOptimizer_Stage3",
        Instead(_PLAN): "estimate_zero3_model_states_mem_needs_all_live estimate_zero3_model_states_mem_needs_all_cold",
    },
    "runtime.zero.stage_1_and_2": {
        "engine.optimizer": "DeepSpeedZeroOptimizer",
        Instead(_PLAN): "estimate_zero2_model_states_mem_needs_all_live estimate_zero2_model_states_mem_needs_all_cold",
        Instead("the engine reduces gradients of all dtypes itself"): "split_half_float_double",
    },
    "runtime.zero.tensor_fragment": {"zero.fragments": ALL},
    "runtime.zero.tiling": {Instead(_NO_TILES): "TiledLinear TiledLinearReturnBias"},
    "runtime.zero.utils": {"zero.zero": "ZeRORuntimeException", "zero.parameters": "is_zero_param"},
    "utils": {
        "standalone.comm": "is_initialized",
        "zero.fragments": ALL,
        "zero.zero": _LEAVES,
        "standalone.utils": "OnDevice RepeatingLoader instrument_w_nvtx log_dist logger set_log_level_from_string",
    },
    "utils.groups": {
        "standalone.comm": "_get_data_parallel_group _get_data_parallel_rank _get_data_parallel_world_size "
        "_get_sequence_parallel_group _get_sequence_parallel_rank _get_sequence_parallel_world_size "
        "_get_sequence_data_parallel_group _get_sequence_data_parallel_rank _get_sequence_data_parallel_world_size "
        "_get_model_parallel_world_size get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size "
        "get_model_parallel_group get_model_parallel_rank get_model_parallel_world_size "
        "get_tensor_model_parallel_group get_tensor_model_parallel_rank get_tensor_model_parallel_world_size"
    },
    "utils.init_on_device": {"standalone.utils": "OnDevice"},
    "utils.logging": {
        "standalone.utils": "log_dist log_levels logger get_current_level set_log_level_from_string should_log_le "
        "warning_once"
    },
    "utils.numa": {"launcher": "parse_range_list", Instead("start the command under numactl"): "get_numactl_cmd"},
    "utils.nvtx": {"standalone.utils": "instrument_w_nvtx"},
    "utils.tensor_fragment": {"zero.fragments": ALL},
    "utils.timer": {"standalone.utils": "SynchronizedWallClockTimer ThroughputTimer"},
    "utils.torch": {"standalone.utils": "required_torch_version"},
    "utils.z3_leaf_module": {"zero.zero": _LEAVES},
    "utils.zero_to_fp32": {
        "checkpoints": "convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint "
        "get_model_state_file get_optim_files load_state_dict_from_zero_checkpoint"
    },
    "zero": _ZERO,
}
"""By the module's name below `deepspeed`: the names that it has, by the module here that they come from; names that are
not served, by what to use `Instead`."""

_SCRIPTS = {
    "checkpoint.ds_to_universal": "checkpoints.main",
    "launcher.runner": "launcher.main",
    "utils.zero_to_fp32": "checkpoints.zero_to_fp32",
}
"""What `python -m` runs of a module."""

_INSTEAD = {
    "pipe": _DATA_ALONE,
    "runtime.pipe": _DATA_ALONE,
    "sequence": _DATA_ALONE,
    "runtime.sequence_parallel": _DATA_ALONE,
    "module_inject": _DATA_ALONE,
    "moe": "models with experts train as they are; their experts are sharded like all parameters",
    "inference": _STREAM,
    "model_implementations": _STREAM,
    "monitor": "log engine.get_global_grad_norm(), engine.get_lr() and the loss from the loop",
    "profiling": "torch.profiler shows the phases of the engine, and engine.shardwise_engine.report() its memory",
    "elasticity": "a checkpoint resumes on any number of ranks; docs/checkpoints.md",
    "autotuning": "`shardwise plan MODEL --search` ranks configurations",
    "compression": "train without it",
    "linear": "PEFT's LoRA works under every stage",
    "nebula": "save_checkpoint writes to any folder",
    "checkpoint": "load_checkpoint takes a checkpoint of any number of ranks and any stage, without a conversion",
    "runtime.checkpoint_engine": "save_checkpoint writes to any folder",
    "runtime.comm": "deepspeed.comm has torch's collectives",
    "runtime.data_pipeline": "sort or sample the data in the loader",
    "runtime.progressive_layer_drop": "drop layers in the model's own forward",
    "runtime.sparse_tensor": "gradients of embeddings are sent whole",
    "utils.comms_logging": "engine.shardwise_engine.report() counts the bytes on the wire",
    "utils.zero_to_torch": "`shardwise export` writes a checkpoint's weights in any dtype",
    "runtime.hybrid_engine": _HYBRID,
    "ops": _TORCHS,
}
"""What to use instead of modules that are not served, by their names or those of packages that they are in."""


@cache
def _refused(name: str, remedy: str) -> type:
    """What stands where DeepSpeed has a function or class that shardwise does not serve. It has no instances."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise CompatibilityError(f"deepspeed.{name} is not served by shardwise: {remedy}")

    return type(name.rpartition(".")[2], (), {"__new__": refuse})


class ServedModule(ModuleType):
    """A module of DeepSpeed's: its names are imported when they are read, and so are the modules inside it."""

    def __getattr__(self, name: str) -> Any:
        inside = _inside(self.__name__)
        if name == "__all__":
            return [listed for listed in dir(self) if not listed.startswith("_")]
        dotted = f"{inside}.{name}".lstrip(".")
        if dotted in SERVED:
            return import_module(f"{self.__name__}.{name}")
        for source, names in SERVED[inside].items():
            is_whole = names == ALL and not name.startswith("_")  # importlib asks for `__path__` and others
            if name in (_source(source).__all__ if is_whole else names.split()):
                return _refused(dotted, source) if isinstance(source, Instead) else getattr(_source(source), name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return sorted({*_names(_inside(self.__name__)), *(name for name in vars(self) if not name.startswith("_"))})


def _inside(name: str) -> str:
    """A module's name below `deepspeed`."""
    return name.partition(".")[2]


def _source(name: str) -> ModuleType:
    return import_module(f"shardwise.compat.{name}")


def _names(inside: str) -> Iterator[str]:
    for source, names in SERVED[inside].items():
        yield from _source(source).__all__ if names == ALL else names.split()
    for module in SERVED:
        package, _, own = module.rpartition(".")
        if own and package == inside:
            yield own


class ServedModules(MetaPathFinder, InspectLoader):
    """Finds and makes the modules of `SERVED`. An import of another one says what to use instead."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(f"{_ROOT}.") or not isinstance(sys.modules.get(_ROOT), ServedModule):
            return None
        inside = _inside(name)
        if inside in SERVED:
            return spec_from_loader(name, self, origin=__file__, is_package=self.is_package(name))
        parts = inside.split(".")
        heads = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
        remedy = next((_INSTEAD[head] for head in heads if head in _INSTEAD), "docs/from-deepspeed.md lists what is")
        # Clients that can do without catch an ImportError.
        raise ModuleNotFoundError(f"{name} is not in the module deepspeed that shardwise serves: {remedy}", name=name)

    def is_package(self, fullname: str) -> bool:
        """All but scripts: an import inside one that has no modules reaches `find_spec`, and its sentence."""
        return _inside(fullname) not in _SCRIPTS

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ServedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: names are found when they are read."""

    def get_source(self, fullname: str) -> str | None:
        """What `python -m` runs."""
        source, _, function = _SCRIPTS.get(_inside(fullname), "").rpartition(".")
        return f"from shardwise.compat.{source} import {function}\n{function}()\n" if function else None


def serve(package: ModuleType) -> None:
    """Make a module `deepspeed` the first of those that are served."""
    package.__class__ = ServedModule
    if not any(isinstance(finder, ServedModules) for finder in sys.meta_path):
        sys.meta_path.append(ServedModules())
