"""When units are gathered, released and reduced."""

from shardwise.schedule.backward import ScheduleEvents
from shardwise.schedule.order import Prefetch
from shardwise.schedule.schedule import Schedule

__all__ = ["Prefetch", "Schedule", "ScheduleEvents"]
