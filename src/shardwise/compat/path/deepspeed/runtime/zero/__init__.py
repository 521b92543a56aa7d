from shardwise.compat.leaves import unwrap_model_for_generation
from shardwise.compat.zero import ZeroParamStatus

from . import partition_parameters, stage3, stage_1_and_2
