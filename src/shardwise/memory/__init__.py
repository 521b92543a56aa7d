"""Buffers, the ledger that accounts for every byte of them, and how much may be in flight at once."""

from shardwise.memory.ledger import Buffer, Entry, Kind, Ledger, Tier

__all__ = ["Buffer", "Entry", "Kind", "Ledger", "Tier"]
