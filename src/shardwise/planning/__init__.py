"""Foresight: what a training run will hold, send and need, before it is launched."""

from shardwise.dry_run.dry_run import Untraceable, foresee
from shardwise.estimate.hardware import Hardware, Rates
from shardwise.models.workload import Workload
from shardwise.planning.planner import plan

__all__ = ["Hardware", "Rates", "Untraceable", "Workload", "foresee", "plan"]
