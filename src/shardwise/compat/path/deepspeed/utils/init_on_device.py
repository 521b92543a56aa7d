from shardwise.compat.loading import OnDevice
