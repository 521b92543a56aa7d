"""Whether all ranks issue the same operations, and what becomes of them if they do not.

Every operation on the wire is numbered in its stream (gathers and reductions run side by side, each in one order) and
described: verb, unit, size. Where the backend knows tags, number and description make the tag of its messages, so an
operation that another rank does not issue finds no partner: nothing is mixed, its ranks wait. Where it does not, an
operation that is not the one that followed the last time is issued only once all ranks have met over it in the store.
Ranks that keep to what they did before send nothing for the check.

Beside the training a thread looks about twice a second. A rank that waits posts where: what it issued of late, what it
waits for. From the posts of all, `judge` decides, on evidence alone: two operations under one number, an operation that
a rank which is gone will never issue, or every rank at a standstill. A rank that is merely slow is none of these and is
waited for. The first to decide writes the verdict; every rank stops with its text.
"""

from shardwise.agreement.watch import Agreement, Ticket

__all__ = ["Agreement", "Ticket"]
