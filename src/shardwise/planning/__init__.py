"""Foresight: what a training run will hold, send and need, before it is launched."""

from shardwise.planning.dry_run import Foreseen, Untraceable
from shardwise.planning.hardware import Hardware, Rates
from shardwise.planning.planner import Plan, plan
from shardwise.planning.runs import foresee
from shardwise.planning.workload import Workload

__all__ = ["Foreseen", "Hardware", "Plan", "Rates", "Untraceable", "Workload", "foresee", "plan"]
