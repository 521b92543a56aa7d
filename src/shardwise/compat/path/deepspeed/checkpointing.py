from shardwise.compat.recompute import checkpoint, configure, is_configured, reset

non_reentrant_checkpoint = checkpoint
