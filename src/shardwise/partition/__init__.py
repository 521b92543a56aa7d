"""What is cut and where: units, their flat layouts, and the policy of placements. No tensors of values."""

from shardwise.partition.layout import Layout, Span
from shardwise.partition.policy import Policy
from shardwise.partition.units import describe_units

__all__ = ["Layout", "Policy", "Span", "describe_units"]
