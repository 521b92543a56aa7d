from shardwise.compat.op_builder import CPUAdamBuilder, FusedAdamBuilder, FusedLambBuilder
