from shardwise.compat.optimizer import DeepSpeedCPUAdam
from shardwise.compat.optimizer import DeepSpeedCPUAdam as FusedAdam
