from shardwise.compat.names import required_torch_version
