"""Configuration: frozen sections, and readers of presets, native files, DeepSpeed's JSON and Accelerate's YAML."""

from shardwise.config.config import Config
from shardwise.config.presets import PRESETS

__all__ = ["PRESETS", "Config"]
