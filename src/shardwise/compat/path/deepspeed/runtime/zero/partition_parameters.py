from shardwise.compat.zero import EMPTY_SHAPE as partitioned_param_data_shape
from shardwise.compat.zero import (
    GatheredParameters,
    Init,
    MultipleAllGatherHandles,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
)
