from shardwise.compat.op_builder import AsyncIOBuilder, CPUAdamBuilder, FusedAdamBuilder, FusedLambBuilder
