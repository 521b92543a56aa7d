from shardwise.compat.optimizer import DeepSpeedCPULion, FusedLion
