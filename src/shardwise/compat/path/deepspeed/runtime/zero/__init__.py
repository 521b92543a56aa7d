from shardwise.compat.leaves import unwrap_model_for_generation
from shardwise.compat.zero import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
)

from . import config, offload_config, partition_parameters, stage3, stage_1_and_2, utils
