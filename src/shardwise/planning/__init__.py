"""Foresight: what a training run will hold, send and need, before it is launched."""

from shardwise.planning.dry import Foreseen, Untraceable
from shardwise.planning.hardware import Hardware
from shardwise.planning.planner import Plan, plan
from shardwise.planning.workload import Workload

__all__ = ["Foreseen", "Hardware", "Plan", "Untraceable", "Workload", "plan"]
