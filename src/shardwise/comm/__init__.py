"""Collectives over the ranks of ZeRO, counted, and checked for agreement between ranks."""

from shardwise.comm.comm import ProcessGroupComm
from shardwise.comm.interface import DONE, Comm, Handle, Hop

__all__ = ["DONE", "Comm", "Handle", "Hop", "ProcessGroupComm"]
