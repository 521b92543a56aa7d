"""Foresight: what a training run will hold, send and need, before it is launched."""

from shardwise.planning.dry_run import Untraceable, foresee
from shardwise.planning.hardware import Hardware, Rates
from shardwise.planning.planner import plan
from shardwise.planning.workload import Workload

__all__ = ["Hardware", "Rates", "Untraceable", "Workload", "foresee", "plan"]
