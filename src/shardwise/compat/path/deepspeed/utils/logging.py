from shardwise.compat.names import log_dist, logger
