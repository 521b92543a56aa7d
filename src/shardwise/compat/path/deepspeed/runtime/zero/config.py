from shardwise.compat.names import ZeroStageEnum
