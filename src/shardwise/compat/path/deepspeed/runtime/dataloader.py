from shardwise.compat.loading import RepeatingLoader
