"""Units: the parameters that are gathered and reduced together, their weights and gradients."""

from shardwise.unit.unit import Unit

__all__ = ["Unit"]
