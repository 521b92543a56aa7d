from shardwise.compat.optimizer import FusedLamb
