from shardwise.compat.optimizer import DeepSpeedOptimizer, ZeROOptimizer
