from shardwise.compat.names import MIN_SWAPPABLE_BYTES
