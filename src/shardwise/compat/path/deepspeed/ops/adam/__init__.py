from shardwise.compat.optimizer import DeepSpeedCPUAdam, FusedAdam
