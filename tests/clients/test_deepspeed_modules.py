"""DeepSpeed's modules by name: what clients import is there, however it is imported, and nothing is loaded for it."""

import importlib
import pickle
import sys
from importlib.util import find_spec

import pytest

from shardwise.compat import activation, modules
from support import run_command

# What clients read: Accelerate, Transformers, TRL, PEFT, Lightning, ms-swift, LLaMA-Factory, OpenRLHF.
CLIENTS = """
deepspeed: initialize DeepSpeedEngine init_distributed comm zero runtime utils ops checkpointing __version__ dist
deepspeed: add_config_arguments get_accelerator moe launcher DeepSpeedConfigError OnDevice
deepspeed.comm: is_initialized init_distributed get_rank get_world_size barrier all_reduce broadcast ReduceOp
deepspeed.zero: Init GatheredParameters register_external_parameter
deepspeed.runtime.lr_schedules: VALID_LR_SCHEDULES WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest
deepspeed.runtime.zero.partition_parameters: ZeroParamStatus
deepspeed.runtime.zero.stage3: DeepSpeedZeroOptimizer_Stage3
deepspeed.runtime.zero.config: DeepSpeedZeroConfig ZeroStageEnum
deepspeed.runtime.zero.offload_config: OffloadDeviceEnum
deepspeed.runtime.zero.utils: ZeRORuntimeException
deepspeed.runtime.engine: DeepSpeedEngine DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable
deepspeed.runtime.config: DeepSpeedConfig
deepspeed.runtime.base_optimizer: DeepSpeedOptimizer
deepspeed.runtime.utils: see_memory_usage clip_grad_norm_
deepspeed.runtime.activation_checkpointing.checkpointing: checkpoint configure
deepspeed.utils: logger log_dist set_z3_leaf_modules safe_get_full_grad groups is_initialized safe_set_full_fp32_param
deepspeed.utils.logging: logger
deepspeed.utils.z3_leaf_module: set_z3_leaf_modules
deepspeed.utils.groups: _get_sequence_parallel_group _get_sequence_parallel_world_size _get_sequence_parallel_rank
deepspeed.utils.zero_to_fp32: get_fp32_state_dict_from_zero_checkpoint get_model_state_file get_optim_files
deepspeed.ops.adam: DeepSpeedCPUAdam FusedAdam
deepspeed.ops.adagrad: DeepSpeedCPUAdagrad
deepspeed.ops.lion: DeepSpeedCPULion
deepspeed.checkpoint.utils: clone_tensors_for_torch_save
deepspeed.checkpointing: configure checkpoint
deepspeed.launcher.runner: DEEPSPEED_ENVIRONMENT_NAME
deepspeed.accelerator: get_accelerator
deepspeed.git_version_info: version
deepspeed.utils.timer: SynchronizedWallClockTimer ThroughputTimer
deepspeed.compression.helper: recursive_getattr recursive_setattr
deepspeed.monitor.monitor: MonitorMaster TensorBoardMonitor WandbMonitor csvMonitor
deepspeed.monitor.config: DeepSpeedMonitorConfig get_monitor_config
deepspeed.runtime.constants: ROUTE_TRAIN ROUTE_EVAL TRAIN_BATCH_SIZE
"""
ROWS = [line.split(": ") for line in CLIENTS.strip().splitlines()]
USED = [(module, name) for module, names in ROWS for name in names.split()]


@pytest.mark.parametrize("module", sorted({module for module, _ in USED}))
def test_what_clients_read_is_there_however_it_is_imported(served, module):
    assert find_spec(module).name == module
    found = served
    for part in module.split(".")[1:]:
        found = getattr(found, part)
    assert found is importlib.import_module(module)
    everything = {}
    exec(f"from {module} import *", everything)
    for name in [name for used, name in USED if used == module]:
        value = getattr(found, name)
        assert getattr(__import__(module, fromlist=[name]), name) is value
        assert name in dir(found) or name.startswith("__")
        assert name.startswith("_") or everything[name] is value


@pytest.mark.parametrize("module", sorted(modules.SERVED))
def test_every_name_of_the_table_is_there(served, module):
    name = f"deepspeed.{module}".rstrip(".")
    found = importlib.import_module(name)
    assert not [listed for listed in dir(found) if not hasattr(found, listed)]
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing'"):
        found.nothing  # noqa: B018  # the attribute is looked up


def test_a_module_is_imported_when_a_name_is_read_and_torch_is_not_needed_before():
    code = (
        "import sys, deepspeed, deepspeed.runtime.zero.stage3, deepspeed.comm; before = 'torch' in sys.modules; "
        "deepspeed.runtime.lr_schedules.WARMUP_LR; print(before, "
        "'shardwise.compat.standalone.schedules' in sys.modules, 'shardwise.compat.engine.engine' in sys.modules)"
    )
    environment = activation.environment({"PATH": ""})
    assert run_command([sys.executable, "-c", code], env=environment).stdout.split() == ["False", "True", "False"]


def test_a_name_can_be_replaced_and_is_found_by_pickle(served, monkeypatch):
    stage = importlib.import_module("deepspeed.runtime.zero.config").ZeroStageEnum
    by_name = b"cdeepspeed.runtime.zero.config\nZeroStageEnum\n."
    assert pickle.loads(by_name) is stage
    monkeypatch.setattr(served, "initialize", print)  # as ms-swift does
    assert importlib.import_module("deepspeed").initialize is print
    monkeypatch.undo()
    assert served.initialize.__name__ == "initialize"


def test_what_is_not_served_says_what_to_use_instead(served):
    for name, remedy in [
        ("deepspeed.pipe", "shard the data alone"),
        ("deepspeed.moe.layer", "models with experts train as they are"),
        ("deepspeed.ops.transformer", "torch's own operators"),
        ("deepspeed.utils.comms_logging", "counts the bytes on the wire"),
        ("deepspeed.utils.nothing", "docs/from-deepspeed.md"),
    ]:
        with pytest.raises(ModuleNotFoundError, match=remedy):
            importlib.import_module(name)
    assert find_spec("deepspeeds") is None


@pytest.mark.parametrize(
    ("module", "shown"),
    [
        ("deepspeed.utils.zero_to_fp32", "--exclude_frozen_parameters"),
        ("deepspeed.launcher.runner", "--num_gpus"),
        ("deepspeed.checkpoint.ds_to_universal", "--output_folder"),
    ],
)
def test_scripts_run_by_their_module(module, shown):
    command = [sys.executable, "-m", module, "--help"]
    assert shown in run_command(command, env=activation.environment({"PATH": ""})).stdout


def test_other_modules_are_no_scripts():
    command = [sys.executable, "-m", "deepspeed.utils.logging"]
    ended = run_command(command, env=activation.environment({"PATH": ""}), check=False)
    assert "deepspeed.utils.logging" in ended.stderr.splitlines()[-1]
    assert ended.returncode == 1
