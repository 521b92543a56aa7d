"""Collectives over one data-parallel group, counted, and checked for agreement between ranks."""

from shardwise.comm.comm import DONE, Comm, Handle, ProcessGroupComm

__all__ = ["DONE", "Comm", "Handle", "ProcessGroupComm"]
