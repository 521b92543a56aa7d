"""Observers that measure any PyTorch program from outside: memory from its storages, wire from its collectives.

`storage` and `wire` import nothing of shardwise, so they can judge it as well as other systems. `labels` gives storages
their kind, and `analyzer` is the public `shardwise.MemoryAnalyzer`::

    with StorageObserver() as memory, WireObserver() as wire:
        train_step()
    print(memory.peak_bytes, wire.sent_bytes)
"""

from shardwise.observe.storage import StorageObserver
from shardwise.observe.wire import WireObserver, WireRecord

__all__ = ["StorageObserver", "WireObserver", "WireRecord"]
