from shardwise.compat.optimizer import FP16_Optimizer
