from shardwise.compat.accelerator import empty_cache, see_memory_usage
