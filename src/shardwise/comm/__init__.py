"""Collectives over the ranks of ZeRO, counted, in process groups of their own."""

from shardwise.comm.comm import ProcessGroupComm
from shardwise.comm.interface import DONE, Comm, Handle, Hop

__all__ = ["DONE", "Comm", "Handle", "Hop", "ProcessGroupComm"]
