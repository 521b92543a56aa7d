"""The update: the user's optimizer on shards, clipping, the loss scale."""

from shardwise.optim.updater import Updater

__all__ = ["Updater"]
