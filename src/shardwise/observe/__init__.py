"""Observers that measure any PyTorch program from outside: memory by watching storages, wire by wrapping collectives.

They know nothing of the engine and import nothing from it, so they can judge it, and other systems beside it::

    with StorageObserver() as memory, WireObserver() as wire:
        train_step()
    print(memory.peak_bytes, wire.sent_bytes)
"""

from shardwise.observe.storage import StorageObserver
from shardwise.observe.wire import WireObserver, WireRecord

__all__ = ["StorageObserver", "WireObserver", "WireRecord"]
