"""Pipelines: engines as the stages of torch's schedules."""

from shardwise.pipelining.stage import EngineStage

__all__ = ["EngineStage"]
