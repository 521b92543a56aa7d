from shardwise.compat.names import *
from shardwise.compat.names import schedule_named as __getattr__
