from shardwise.compat.optimizer import DeepSpeedCPULion
from shardwise.compat.optimizer import DeepSpeedCPULion as FusedLion
