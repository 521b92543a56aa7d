from shardwise.compat.engine import DeepSpeedEngine
