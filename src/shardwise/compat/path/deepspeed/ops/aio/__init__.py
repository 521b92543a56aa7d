from shardwise.compat.op_builder import AsyncIOBuilder
