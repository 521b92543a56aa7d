"""When units are gathered, released and reduced."""

from shardwise.schedule.schedule import Schedule

__all__ = ["Schedule"]
