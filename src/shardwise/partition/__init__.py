"""The division of a model: units, their flat layouts, and the policy of each unit. No values, no process groups."""

from shardwise.partition.layout import Layout, Span
from shardwise.partition.policy import Policy
from shardwise.partition.units import describe_units

__all__ = ["Layout", "Policy", "Span", "describe_units"]
