from shardwise.compat.recompute import checkpoint, configure, is_configured, reset
