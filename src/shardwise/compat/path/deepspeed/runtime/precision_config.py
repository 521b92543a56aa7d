from shardwise.compat.settings import precision_named as __getattr__
