"""DeepSpeed's API, served by shardwise: see `shardwise.compat`."""

from shardwise._version import __version__ as _own_version
from shardwise.compat.absent import AbsentModules, refused
from shardwise.compat.accelerator import get_accelerator
from shardwise.compat.activation import DEEPSPEED_VERSION as _version
from shardwise.compat.comm import init_distributed
from shardwise.compat.engine import DeepSpeedEngine
from shardwise.compat.initialize import add_config_arguments, initialize
from shardwise.compat.loading import OnDevice
from shardwise.compat.names import log_dist, logger
from shardwise.compat.optimizer import DeepSpeedOptimizer
from shardwise.errors import ConfigError as DeepSpeedConfigError

from . import accelerator, checkpoint, checkpointing, comm, launcher, moe, ops, runtime, utils, zero

__version__ = f"{_version}+shardwise.{_own_version}"
version = __version__
__version_major__, __version_minor__, __version_patch__ = map(int, _version.split("."))
__git_hash__ = __git_branch__ = None
dist = comm
add_core_arguments = add_config_arguments
PipelineModule = refused("PipelineModule", "shard the data alone, with stage 3 for models that do not fit")
init_inference = refused("init_inference", "pass no optimizer to deepspeed.initialize, and call engine.eval()")
tp_model_init = refused("tp_model_init", "shard the data alone, with stage 3 for models that do not fit")
default_inference_config = refused("default_inference_config", "see init_inference")
AbsentModules.install()
