from shardwise.compat.zero import ZeroParamStatus

from . import partition_parameters
